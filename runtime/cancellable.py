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
    lock = threading.Lock()
    running = abandoned = False

    def run() -> None:
        nonlocal running
        with lock:
            running = not abandoned
        try:
            if running:
                use_context(context)
                work()
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="engram-tables", daemon=True)
    try:
        thread.start()
        while not done.wait(_POLL_S):
            poll()
    except BaseException:
        with lock:  # a thread that has not begun yet, or could not be started, does not begin
            abandoned = True
        while running and not done.is_set():  # the first call may find nothing to cancel yet
            cancel()
            done.wait(_POLL_S)
        raise
    thread.join()
    if errors:
        raise errors[0]
