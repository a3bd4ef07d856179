# SPDX-License-Identifier: Apache-2.0
"""Long calls of the library on a thread of their own: what ends them, and which GPU they mean."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from devices import Torch
from waiting import NEVER, PATIENCE

from trtllm_engram.plugins.errors import EngramError
from trtllm_engram.runtime.cancellable import run_cancellable
from trtllm_engram.runtime.gpus import current_context, use_context


def test_work_that_is_done():
    threads = []
    run_cancellable(lambda: threads.append(threading.current_thread()))
    assert threads[0] is not threading.main_thread()
    assert not threads[0].is_alive()


def test_its_error_is_the_callers():
    def work():
        raise EngramError("no room")

    with pytest.raises(EngramError, match="no room"):
        run_cancellable(work)


def test_it_is_watched():
    polls, enough = [], threading.Event()

    def poll():
        polls.append(threading.current_thread())
        if len(polls) == 3:
            enough.set()

    run_cancellable(lambda: enough.wait(PATIENCE), poll)
    assert set(polls) == {threading.main_thread()}


@pytest.mark.parametrize("deaf_for", [0, 2])
def test_ctrl_c_cancels_it(deaf_for):
    """The first calls of cancel may come before there is anything to cancel."""
    cancelled, calls = threading.Event(), []

    def cancel():
        calls.append(None)
        if len(calls) > deaf_for:
            cancelled.set()

    def work():
        os.kill(os.getpid(), signal.SIGINT)
        assert cancelled.wait(PATIENCE)
        raise EngramError("cancelled")

    with pytest.raises(KeyboardInterrupt):
        run_cancellable(work, cancel=cancel)
    assert len(calls) == deaf_for + 1


def test_ctrl_c_before_it_begins(monkeypatch):
    """As while the thread starts: then there is nothing to cancel."""
    began = []

    def start(thread):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        run_cancellable(lambda: began.append(1), cancel=lambda: began.append(2))
    assert began == []


def test_a_poll_that_fails_cancels_it():
    cancelled = threading.Event()

    def poll():
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_cancellable(lambda: cancelled.wait(PATIENCE), poll, cancelled.set)


def test_a_second_ctrl_c_leaves_it_behind():
    release = threading.Event()

    def cancel():
        os.kill(os.getpid(), signal.SIGINT)

    def work():
        os.kill(os.getpid(), signal.SIGINT)
        release.wait(NEVER)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_cancellable(work, cancel=cancel)
    assert time.monotonic() - started < PATIENCE
    release.set()


def test_other_threads_may_call_it():
    results = []
    thread = threading.Thread(target=lambda: run_cancellable(lambda: results.append(1)))
    thread.start()
    thread.join()
    assert results == [1]


def test_no_driver_no_context():
    assert current_context("libno-such-driver.so") is None
    use_context(None, "libno-such-driver.so")
    use_context(1, "libno-such-driver.so")


@pytest.mark.gpu
def test_the_callers_gpu_is_its_own():
    Torch().put(np.zeros(1, np.int32))
    seen = []
    run_cancellable(lambda: seen.append(current_context()))
    assert seen == [current_context()]
    assert seen[0] is not None
