# SPDX-License-Identifier: Apache-2.0
"""How tests wait: for a state, for as long as it takes; and how they hold code to its seconds."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

# Far more than anything takes that is not waited for in vain, on the busiest machine.
PATIENCE = 120.0
NEVER = 10 * PATIENCE  # the timeout of what is to be told at once, or not at all


def wait_until(
    holds: Callable[[], bool],
    what: Callable[[], object] = lambda: "what was waited for",
    seconds: float = PATIENCE,
) -> None:
    """Fails where it does not come to hold, with what there is to say then."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


class LateError(AssertionError):
    """Something took more seconds than it may."""


def assert_soon(took: float, seconds: float) -> None:
    if took >= seconds:
        raise LateError(f"expected it within {seconds:g} s, found {took:.1f} s")


def in_time(test: Callable[..., Any]) -> Callable[..., Any]:
    """For a test with assert_soon(): a busy machine may be late once, which is reported, and late
    code is so a second time. (Ends the processes of a turn's nodes before the next.)"""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            return test(*args, **kwargs)
        except LateError as late:
            warnings.warn(f"{test.__name__}: a second turn: {late}", stacklevel=1)
        for end in (getattr(value, "end_processes", None) for value in kwargs.values()):
            if end is not None:
                end()
        return test(*args, **kwargs)

    return run
