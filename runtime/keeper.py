# SPDX-License-Identifier: Apache-2.0
"""A keeper: a process that holds host tables, so that a restarted server finds them loaded."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from trtllm_engram.builder.block_sums import Progress
from trtllm_engram.plugins.errors import EngramError, InputError

from . import _native
from .cancellable import run_cancellable
from .holders import KEEPER, Holder, find_holder, find_holders
from .tables import report_progress


def serve(
    toml: str,
    name: str,
    socket: str = "",
    *,
    stop: threading.Event,
    on_ready: Callable[[Holder], None],
    progress: Progress | None = None,
) -> None:
    """Loads the tables of a TOML text and hands them out until `stop` is set.

    Args:
        name: what those who attach call this keeper.
        socket: a path to listen at, for containers with separate network namespaces.
        on_ready: called in this thread once tables can be had.
    """
    ready = False

    def poll() -> None:
        nonlocal ready
        if stop.is_set():
            end()
        elif not ready:
            report_progress(progress)
            holder = find_holder(os.getpid())
            if holder is not None and holder.role == KEEPER and holder.tables:
                ready = True
                on_ready(holder)

    def end() -> None:
        _native.cancel_tables()
        _native.stop_serving()

    where = f"keeper {name}"
    try:
        run_cancellable(
            lambda: _native.serve_tables(toml, str(Path.cwd()), where, name, socket), poll, end
        )
    except EngramError:
        if ready or not stop.is_set():
            raise
    if not ready and stop.is_set():
        raise EngramError(f"{where}: stopped before its tables were loaded")


def find_keeper(name: str | None) -> Holder:
    """This user's keeper of a name, or the only one."""
    keepers = [one for one in find_holders() if one.role == KEEPER]
    wanted = [one for one in keepers if name in (None, one.name)]
    if len(wanted) == 1:
        return wanted[0]
    found = ", ".join(f"{one.name!r} (pid {one.pid})" for one in keepers) or "none"
    if name is None:
        what = "the name of one" if wanted else "one"
    else:
        what = f"{name!r} once" if wanted else repr(name)
    raise InputError(f"keeper: expected {what} among this user's, found {found}")


def stop_keeper(name: str | None, timeout_s: float) -> Holder:
    """Ends a keeper and waits until it is gone; what others hold of its tables stays theirs."""
    keeper = find_keeper(name)
    process = os.pidfd_open(keeper.pid)
    try:
        found = find_holder(keeper.pid)
        if found is not None and found.id == keeper.id:  # the number is not another's by now
            signal.pidfd_send_signal(process, signal.SIGTERM)
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        if not waiting.poll(timeout_s * 1000):
            raise EngramError(
                f"keeper {keeper.name!r}: expected the end of pid {keeper.pid} within "
                f"{timeout_s:g} s, found it running"
            )
    except ProcessLookupError:
        pass
    finally:
        os.close(process)
    return keeper
