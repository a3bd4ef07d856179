# SPDX-License-Identifier: Apache-2.0
"""`tables load` and `serve` as processes that share tables, wait for each other and are ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time

import pytest
from command_line import only_line
from table_commands import document, ended, process, waits_for_others
from table_machine import library_environment, points_library
from table_ranks import Stop
from waiting import NEVER, PATIENCE, wait_until

from trtllm_engram.runtime.holders import find_holders
from trtllm_engram.runtime.keeper import find_keeper

pytest_plugins = ["command_line_fixtures"]
pytestmark = pytest.mark.multiproc
LAYERS = {"engram_1": 1, "engram_5": 5}


def test_ranks_share_and_end_when_they_are_told(files, keeper_name):
    with contextlib.ExitStack() as stack:
        options = ("--size", 3, "--group", keeper_name, "--hold", "--json")
        ranks = [
            stack.enter_context(process("load", "store", "--rank", rank, *options, cwd=files))
            for rank in range(3)
        ]
        documents = [document(rank) for rank in ranks]
        for rank, found in enumerate(documents):
            for table in found["tables"].values():
                assert (table["rank"], table["size"], table["memory"]) == (rank, 3, "memfd")
        pids = [rank.pid for rank in ranks]
        holders = [one for one in find_holders() if one.pid in pids]
        assert [(one.pid, one.rank, one.size) for one in holders] == [
            (pid, rank, 3) for rank, pid in enumerate(pids)
        ]
        assert {one.name for one in holders[0].tables} == LAYERS.keys()
        for rank, number in zip(
            ranks, (signal.SIGTERM, signal.SIGINT, signal.SIGTERM), strict=True
        ):
            rank.send_signal(number)
            assert ended(rank) == (0, "", "")
    assert [one for one in find_holders() if one.pid in pids] == []


def test_a_launchers_ranks_share(files, keeper_name, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", keeper_name)
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            ranks.append(stack.enter_context(process("load", "store", "--json", cwd=files)))
        for rank, started in enumerate(ranks):
            code, out, err = ended(started)
            assert (code, err) == (0, "")
            for table in json.loads(out)["tables"].values():
                assert (table["rank"], table["size"]) == (rank, 2)


def test_a_rank_that_never_comes(run, keeper_name):
    started = time.monotonic()
    options = ("--rank", 0, "--size", 2, "--group", keeper_name, "--timeout", "0.5")
    code, out, err = run("tables", "load", "store", *options)
    assert (code, out) == (1, "")
    assert only_line(err).startswith("trtllm-engram tables: error: rank 1: never came")
    assert time.monotonic() - started < PATIENCE / 2


def test_a_rank_that_cannot_begin(files, keeper_name):
    """One without the store: the other hears of it, long before its timeout."""
    group = ("--group", keeper_name, "--size", "2", "--timeout", str(NEVER))
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(process("load", store, "--rank", rank, *group, cwd=files))
            for rank, store in enumerate(("store", "elsewhere"))
        ]
        (code, _, err), (code_there, _, err_there) = map(ended, ranks)
    text = "elsewhere: expected a store (with engram.json), found none"
    assert (code, only_line(err)) == (2, f"trtllm-engram tables: error: rank 1: {text}")
    assert code_there == 2
    assert err_there.splitlines()[-1] == f"trtllm-engram tables: error: {text}"


def test_a_keeper_that_is_stopped_while_it_loads(files, tmp_path, keeper_name):
    stop = Stop(tmp_path, "load.block", "keeper")
    environment = os.environ | library_environment(points_library()) | stop.environment
    with process("serve", "store", "--name", keeper_name, cwd=files, env=environment) as keeper:
        wait_until(lambda: stop.holds(keeper.pid), keeper.poll)
        assert find_keeper(keeper_name).tables == ()
        keeper.send_signal(signal.SIGTERM)
        keeper.send_signal(signal.SIGCONT)
        code, _, err = ended(keeper)
    assert code == 1
    assert err.splitlines()[-1] == (
        f"trtllm-engram tables: error: keeper {keeper_name}: stopped before its tables were loaded"
    )


def test_ctrl_c_while_it_waits(files, keeper_name):
    options = ("--rank", 0, "--size", 2, "--group", keeper_name)
    with process("load", "store", *options, cwd=files) as started:
        waits_for_others(keeper_name)
        started.send_signal(signal.SIGINT)
        code, out, err = ended(started)
    assert (code, out) == (130, "")
    assert only_line(err) == "trtllm-engram tables: error: interrupted"


def test_keeper(files, run, keeper_name):
    """Served, attached to, ended: who has attached keeps what it has."""
    attach = ("load", "store", "--memory", "keeper", "--keeper", keeper_name, "--json")
    with contextlib.ExitStack() as stack:
        serving = ("serve", "store", "--name", keeper_name, "--json")
        keeper = stack.enter_context(process(*serving, cwd=files))
        found = document(keeper)["keeper"]
        assert (found["pid"], found["role"], found["name"]) == (keeper.pid, "keeper", keeper_name)
        assert {one["name"]: one["layer"] for one in found["tables"]} == LAYERS
        rank = stack.enter_context(process(*attach, "--hold", cwd=files))
        for table in document(rank)["tables"].values():
            assert table["keeper"] == keeper_name
        _, out, _ = run("tables", *attach[:-1])
        assert re.match(rf"attached to  \S+ \S+ of keeper {keeper_name}\nin all ", out)
        _, out, _ = run("tables", *attach)
        assert {table["keeper"] for table in json.loads(out)["tables"].values()} == {keeper_name}
        code, out, err = run("tables", "stop", keeper_name, "--json")
        assert (code, err) == (0, "")
        stopped = json.loads(out)
        assert stopped["stopped"]["pid"] == keeper.pid
        holding = {one["pid"] for one in stopped["still_held_by"]}
        assert holding & {keeper.pid, rank.pid} == {rank.pid}
        assert ended(keeper) == (0, "", "")
        assert {one.pid for one in find_holders()} & {keeper.pid, rank.pid} == {rank.pid}
        rank.send_signal(signal.SIGTERM)
        assert ended(rank) == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_keeper_ends_by_signal(files, keeper_name, number):
    with process("serve", "store", "--name", keeper_name, cwd=files) as keeper:
        line = keeper.stdout.readline()
        assert line.startswith(f"keeper {keeper_name}, pid {keeper.pid}, holds 2 tables of ")
        keeper.send_signal(number)
        assert ended(keeper) == (0, "", "")
