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
_listeners: list[list[str]] = []


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
            if level == logging.ERROR:
                with _lock:
                    for listener in _listeners:
                        listener.append(message)
                # Who listens raises them; shown as well they would be told twice.
                level = logging.DEBUG if _listeners else logging.ERROR
            _log.log(level, "%s", message)

    return Logger()


@contextlib.contextmanager
def told(what: str) -> Iterator[Failure]:
    """Collects the errors that TensorRT logs meanwhile, for `Failure.check`."""
    failure = Failure(what)
    with _lock:
        _listeners.append(failure.lines)
    try:
        yield failure
    finally:
        with _lock:
            _listeners[:] = [lines for lines in _listeners if lines is not failure.lines]


class Failure:
    def __init__(self, what: str) -> None:
        self.what = what
        self.lines: list[str] = []

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
        if self._ours():
            raise EngramError(f"{self.what}: TensorRT failed: {self.text()}")

    def text(self) -> str:
        """What went wrong, in one line; our own plugins' words come first."""
        return " ".join((self._ours() or self.lines or ["it said nothing"])[0].split())

    def _ours(self) -> list[str]:
        return [line for line in self.lines if "Engram" in line]
