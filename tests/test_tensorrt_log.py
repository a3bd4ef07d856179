# SPDX-License-Identifier: Apache-2.0
"""TensorRT's log: whose errors become whose exceptions, and which are shown all the same."""

import logging
import threading
from types import SimpleNamespace

import pytest

from trtllm_engram.builder import tensorrt_log
from trtllm_engram.builder.tensorrt_log import told
from trtllm_engram.plugins.errors import EngramError


class ILogger:
    """As TensorRT's: who derives from it gets the lines."""

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


@pytest.fixture
def say(monkeypatch, caplog):
    """Logs an error as TensorRT does, in this thread or in one of its own."""
    monkeypatch.setattr(tensorrt_log, "import_tensorrt", lambda: SimpleNamespace(ILogger=ILogger))
    caplog.set_level(logging.DEBUG, "trtllm_engram.tensorrt")
    logger = tensorrt_log.tensorrt_logger.__wrapped__()

    def log(text, *, elsewhere=False):
        call = in_thread if elsewhere else lambda function, *arguments: function(*arguments)
        call(logger.log, ILogger.ERROR, text)

    return log


def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


def shown(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["this thread", "TensorRT's own"])
def test_one_listener_gets_every_error(say, caplog, elsewhere):
    with told("engine") as failure:
        say("no memory", elsewhere=elsewhere)
        with pytest.raises(EngramError, match=r"^engine: TensorRT failed: no memory$"):
            failure.check(None)
    assert shown(caplog) == []
    say("nobody listens")
    assert shown(caplog) == ["nobody listens"]


def test_each_thread_gets_its_own(say, caplog):
    """And ours alone refuse a plan that TensorRT takes."""

    def fail(what):
        with told(what) as failure:
            say(f"EngramHash: {what}")
            with pytest.raises(
                EngramError, match=rf"^{what}: TensorRT failed: EngramHash: {what}$"
            ):
                failure.check_plugins()
        ended.append(what)

    ended = []
    with told("outer") as failure:
        in_thread(fail, "inner")
        failure.check_plugins()
        assert failure.text() == "it said nothing to our logger"
        fail("same thread")
        assert failure.text() == "EngramHash: same thread"
    assert ended == ["inner", "same thread"]
    assert shown(caplog) == []


def test_nobodys_error_among_several_listeners_is_shown(say, caplog):
    """It may be the reason of any, but is the proof of none."""
    texts = []

    def listen():
        with told("other") as failure:
            say("EngramGate: of a worker", elsewhere=True)
            failure.check_plugins()
            texts.append(failure.text())

    with told("engine") as failure:
        in_thread(listen)
        failure.check_plugins()
        texts.append(failure.text())
        say("no memory")
        assert failure.text() == "no memory"
    assert texts == ["EngramGate: of a worker"] * 2
    assert shown(caplog) == ["EngramGate: of a worker"]
