# SPDX-License-Identifier: Apache-2.0
"""Table calls of the library that last minutes: watched, and ended by Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable

from . import _native
from .gpus import current_context, use_context

_POLL_S = 0.1


def run_cancellable(
    work: Callable[[], None],
    poll: Callable[[], None] = lambda: None,
    cancel: Callable[[], None] = _native.cancel_tables,
) -> None:
    """Runs `work`, which calls the library, on a thread of its own: a call would keep this one from
    handling signals. What a handler or `poll` raises here, ten times a second, cancels the call and
    is raised once that has ended; raised again meanwhile, it leaves the thread behind.
    """
    done = threading.Event()
    errors: list[BaseException] = []
    context = current_context()  # the GPU that the caller has chosen

    def run() -> None:
        try:
            use_context(context)
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="engram-tables", daemon=True)
    thread.start()
    try:
        while not done.wait(_POLL_S):
            poll()
    except BaseException:
        while not done.is_set():  # the first call may come before there is anything to cancel
            cancel()
            done.wait(_POLL_S)
        raise
    thread.join()
    if errors:
        raise errors[0]
