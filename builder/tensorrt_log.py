# SPDX-License-Identifier: Apache-2.0
"""TensorRT's log as Python's, logger `trtllm_engram.tensorrt`; errors become exceptions' texts."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator
from typing import Any

from trtllm_engram.plugins.errors import EngramError
from trtllm_engram.plugins.registration import import_tensorrt

_log = logging.getLogger("trtllm_engram.tensorrt")
_lock = threading.Lock()
_listeners: list[Failure] = []


@functools.cache
def tensorrt_logger() -> Any:
    """The one ILogger of the process: TensorRT keeps the first that it is given."""
    trt = import_tensorrt()
    severities = trt.ILogger
    levels = {
        severities.INTERNAL_ERROR: logging.ERROR,
        severities.ERROR: logging.ERROR,
        severities.WARNING: logging.WARNING,
        severities.INFO: logging.INFO,
        severities.VERBOSE: logging.DEBUG,
    }

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            level = levels[severity]
            # Who listens raises it; shown as well it would be told twice.
            if level == logging.ERROR and _heard(message):
                level = logging.DEBUG
            _log.log(level, "%s", message)

    return Logger()


def _heard(error: str) -> bool:
    """Whether it is known whose error this is, of those who listen."""
    this_thread = threading.get_ident()
    with _lock:
        threads = {listener.thread for listener in _listeners}
        is_known = this_thread in threads or len(threads) == 1
        for listener in _listeners:
            if not is_known:
                listener.others.append(error)
            elif this_thread not in threads or listener.thread == this_thread:
                listener.lines.append(error)
    return is_known


@contextlib.contextmanager
def told(what: str) -> Iterator[Failure]:
    """Collects the errors that TensorRT logs meanwhile, for `Failure.check`.

    An error of this thread is this listener's. TensorRT has threads of its own too: what a thread
    without a listener logs is this listener's if no other thread listens, and else may be
    anybody's. That stays an error in the log, and is the reason only where there is no other.
    """
    failure = Failure(what)
    with _lock:
        _listeners.append(failure)
    try:
        yield failure
    finally:
        with _lock:
            _listeners.remove(failure)


class Failure:
    """Errors that the thread which makes it listens to."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.thread = threading.get_ident()
        self.lines: list[str] = []  # its own
        self.others: list[str] = []  # perhaps another thread's

    def check(self, result: Any) -> Any:
        """The result, unless TensorRT gave None or False: then an EngramError with what it said."""
        if result is None or result is False:
            raise EngramError(f"{self.what}: TensorRT failed: {self.text()}")
        return result

    def check_plugins(self) -> None:
        """Raises what our plugins complained of, where TensorRT goes on all the same.

        10.6 reads a plan and makes an execution context although a plugin refused either, and fails
        in the first run.
        """
        if _ours(self.lines):
            raise EngramError(f"{self.what}: TensorRT failed: {self.text()}")

    def text(self) -> str:
        """What went wrong, in one line; our own plugins' words come first."""
        lines = self.lines or self.others or ["it said nothing to our logger"]
        return " ".join((_ours(lines) or lines)[0].split())


def _ours(lines: list[str]) -> list[str]:
    return [line for line in lines if "Engram" in line]
