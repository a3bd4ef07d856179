# SPDX-License-Identifier: Apache-2.0
"""`tables load`, `serve`, `status`, `stop` and what shows them: the example and the benchmark."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from command_line import COMMAND, only_line
from table_holders import TABLE, holder
from table_machine import library_environment, points_library
from table_ranks import Stop
from waiting import NEVER, PATIENCE, wait_until

from trtllm_engram.runtime import cli, open_store
from trtllm_engram.runtime.holders import find_holders
from trtllm_engram.runtime.keeper import find_keeper
from trtllm_engram.runtime.tables import describe_tables

pytest_plugins = ["command_line_fixtures"]
ACTIONS = ("load", "status", "serve", "stop", "count")
LAYERS = {"engram_1": 1, "engram_5": 5}


@contextlib.contextmanager
def process(*words: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """`trtllm-engram tables WORDS`, which goes on."""
    argv = [*COMMAND, "tables", *map(str, words)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, **options) as started:
        try:
            yield started
        finally:
            started.kill()


def document(started: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON object that a process prints before it waits."""
    text = ""
    for line in started.stdout:
        text += line
        if line == "}\n":
            return json.loads(text)
    raise AssertionError(f"{text}{started.stderr.read()}")


def ended(started: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = started.communicate(timeout=PATIENCE)
    return started.returncode, out, err


def waits_for_others(group: str) -> None:
    """Until rank 0 of a group listens."""
    wait_until(lambda: group in Path("/proc/net/unix").read_text())


@pytest.fixture
def keeper_name() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.mark.parametrize("action", ACTIONS)
def test_help_of_every_action(run, action):
    code, out, err = run("tables", action, "--help")
    assert (code, err) == (0, "")
    words = out.partition("\nexample:\n")[2].removesuffix("&\n").split()
    assert words[:3] == ["trtllm-engram", "tables", action]
    args, unknown = cli.build_parser(words[1:]).parse_known_args(words[1:])
    assert (args.action, unknown) == (action, [])
    assert max(map(len, out.splitlines())) <= 100
    assert "--json" in out
    assert "--quiet" in out


def test_load(run):
    code, out, err = run("tables", "load", "store", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    store = open_store("store")
    assert found["pid"] == os.getpid()
    assert found["seconds"] > 0
    assert {name: table["layer"] for name, table in found["tables"].items()} == LAYERS
    for table in found["tables"].values():
        rows = store.config.num_embeddings[store.config.layer_ids.index(table["layer"])]
        assert table["num_bytes"] >= rows * (64 + 2)
        assert (table["memory"], table["rank"], table["size"]) == ("memfd", 0, 1)
    assert describe_tables() == {}


def test_load_as_text(run):
    code, out, err = run("tables", "load", "store", "--layers", "5", "--verify")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("loaded")
    assert lines[-1].split()[:2] == ["engram_5", "5"]
    assert not any(line.startswith("engram_1") for line in lines)


@pytest.mark.parametrize("model", ["store", "checkpoint", "checkpoint/config.json"])
def test_load_by_formula(run, model):
    code, out, err = run("tables", "load", model, "--formula", "--seed", "3", "--json")
    assert (code, err) == (0, "")
    assert {name: table["layer"] for name, table in json.loads(out)["tables"].items()} == LAYERS


@pytest.mark.parametrize("memory", ["shm", "private"])
def test_load_into_other_memory(run, memory):
    code, out, err = run("tables", "load", "store", "--memory", memory, "--json")
    assert (code, err) == (0, "")
    assert {table["memory"] for table in json.loads(out)["tables"].values()} == {memory}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("load",), "STORE"),
        (("load", "nowhere"), "expected a store"),
        (("load", "checkpoint"), "expected a store"),
        (("load", "store", "--seed", "1"), "--seed: expected with --formula"),
        (("load", "store", "--layers", "1,2"), "--layers: expected some of 1,5, found '1,2'"),
        (("load", "store", "--layers", ""), "--layers: expected some of 1,5, found ''"),
        (("load", "store", "--layers", "9" * 5000), "--layers: expected some of 1,5"),
        (("load", "store", "--memory", "ram"), "memory"),
        (("load", "store", "--pages", "3m"), "pages"),
        (("load", "store", "--numa", "node:x"), "numa"),
        (("load", "store", "--placement", "tape"), "invalid choice"),
        (("load", "store", "--keeper", "k"), "--keeper: expected with --memory keeper, found k"),
        (("load", "store", "--rank", "0"), "rank and size"),
        (("load", "store", "--rank", "2", "--size", "2"), "rank: expected 0 to 1, found 2"),
        (("load", "store", "--timeout", "-1"), "--timeout: expected 0.001 to 604800"),
        (("load", "store", "--timeout", "nan"), "--timeout: expected 0.001 to"),
        (("load", "store", "--checkpoint", "nowhere"), "nowhere"),
        (("serve", "store", "--memory", "private"), "memory"),
        (("serve", "store", "--name", ""), "name"),
        (("stop", "no such keeper"), "expected 'no such keeper'"),
        (("stop", "--timeout", "-1"), "--timeout: expected 0 to 1e+06"),
        (("status", "store"), "unrecognized arguments"),
        (("frobnicate",), "invalid choice"),
        ((), "ACTION"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(run, words, expected):
    code, out, err = run("tables", *words)
    assert (code, out) == (2, "")
    line = only_line(err)
    assert re.match(r"trtllm-engram tables( \w+)?: error: (?!tables: )", line)
    assert expected in line
    assert describe_tables() == {}


def test_a_keeper_that_is_not_there(run, keeper_name):
    words = ("load", "store", "--memory", "keeper", "--keeper", keeper_name, "--timeout", "1")
    code, out, err = run("tables", *words)
    assert code in (1, 2)
    assert out == ""
    assert keeper_name in only_line(err)


def test_status_as_text_and_json(run):
    with holder({"name": "of a test", "role": "rank", "rank": 1, "size": 2}) as pid:
        code, out, err = run("tables", "status", "--json")
        assert (code, err) == (0, "")
        (found,) = [one for one in json.loads(out)["holders"] if one["pid"] == pid]
        assert found["tables"][0]["num_bytes"] == 1000
        _, out, _ = run("tables", "status")
        (line,) = [line for line in out.splitlines() if str(pid) in line.split()]
    words = line.split()
    expected = f"of a test rank 1 of 2 {pid} engram_1 1 kB memfd 25% host"
    assert words[:-2] == expected.split()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", " ".join(words[-2:]))


def test_status_of_a_keeper_that_loads(run, keeper_name):
    with holder({"name": keeper_name, "tables": []}) as pid:
        _, out, _ = run("tables", "status")
    (line,) = [line for line in out.splitlines() if str(pid) in line.split()]
    assert line.split()[:-2] == ["keeper", keeper_name, str(pid), "loading"]


def test_status_with_nothing_to_tell(run, monkeypatch):
    monkeypatch.setattr("trtllm_engram.runtime.cli.tables.status.find_holders", list)
    assert run("tables", "status") == (0, "no tables\n", "")


def test_stop_says_who_still_holds(run, keeper_name):
    """Of its memory; who has a copy of its own holds nothing of the keeper's."""
    keeper = secrets.token_hex(16)
    rank = {"role": "rank", "name": "serving", "id": ""}
    with (
        holder({"name": keeper_name, "id": keeper}) as pid,
        holder(rank | {"tables": [TABLE | {"keeper": keeper}]}) as same,
        holder(rank | {"tables": [TABLE]}),
    ):
        code, out, err = run("tables", "stop", keeper_name, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["stopped"]["pid"] == pid
    assert [one["pid"] for one in found["still_held_by"]] == [same]


def test_stop_that_takes_too_long(run, keeper_name):
    with holder({"name": keeper_name}, stubborn=True):
        code, out, err = run("tables", "stop", keeper_name, "--timeout", "0.1")
    assert (code, out) == (1, "")
    assert "expected the end of pid" in only_line(err)


@pytest.mark.multiproc
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


@pytest.mark.multiproc
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


@pytest.mark.multiproc
def test_a_rank_that_never_comes(run, keeper_name):
    started = time.monotonic()
    options = ("--rank", 0, "--size", 2, "--group", keeper_name, "--timeout", "0.5")
    code, out, err = run("tables", "load", "store", *options)
    assert (code, out) == (1, "")
    assert only_line(err).startswith("trtllm-engram tables: error: rank 1: never came")
    assert time.monotonic() - started < PATIENCE / 2


@pytest.mark.multiproc
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


@pytest.mark.multiproc
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


@pytest.mark.multiproc
def test_ctrl_c_while_it_waits(files, keeper_name):
    options = ("--rank", 0, "--size", 2, "--group", keeper_name)
    with process("load", "store", *options, cwd=files) as started:
        waits_for_others(keeper_name)
        started.send_signal(signal.SIGINT)
        code, out, err = ended(started)
    assert (code, out) == (130, "")
    assert only_line(err) == "trtllm-engram tables: error: interrupted"


@pytest.mark.multiproc
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


@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_keeper_ends_by_signal(files, keeper_name, number):
    with process("serve", "store", "--name", keeper_name, cwd=files) as keeper:
        line = keeper.stdout.readline()
        assert line.startswith(f"keeper {keeper_name}, pid {keeper.pid}, holds 2 tables of ")
        keeper.send_signal(number)
        assert ended(keeper) == (0, "", "")


@pytest.mark.multiproc
def test_the_example(tmp_path):
    """examples/shared_tables.py: every rank holds all, and survivors go on."""
    script = ROOT / "examples/shared_tables.py"
    refused = subprocess.run(
        [sys.executable, script, "--ranks", "0"], capture_output=True, text=True, check=False
    )
    assert refused.stderr.endswith("error: --ranks: expected 1 or more, found 0\n")
    words = [sys.executable, script, "--ranks", "3", "--gb", "0.01", "--kill", "1"]
    for form in ([], ["--json"]):
        done = subprocess.run(
            [*words, *form], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert (done.returncode, done.stderr) == (0, "")
        if not form:
            assert "rank 1 killed:" in done.stdout
            continue
        events = json.loads(done.stdout)
        ranks = {event: [one["rank"] for one in holders] for event, holders in events.items()}
        assert ranks == {"loaded": [0, 1, 2], "rank 1 killed": [0, 2]}
        for one in (one for holders in events.values() for one in holders):
            assert {table["memory"] for table in one["tables"].values()} == {"memfd"}
            assert sum(table["num_bytes"] for table in one["tables"].values()) > 9e6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multiproc
def test_a_rank_of_the_example_that_cannot_begin_ends_it(tmp_path):
    """Its parent knows, so nobody waits out the timeout for it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if '--rank' in sys.argv and sys.argv[sys.argv.index('--rank') + 1] == '1':\n"
        "    sys.exit('this one does not begin')\n"
    )
    script = ROOT / "examples/shared_tables.py"
    words = [sys.executable, script, "--ranks", "2", "--gb", "0.01", "--timeout", "3600"]
    paths = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 1
    assert "rank 1: expected an answer, found exit code 1" in done.stderr


def test_the_example_of_gpus_needs_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    script = ROOT / "examples/sharded_tables.py"
    paths = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        [sys.executable, script, "--ranks", "2"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 1
    assert only_line(done.stderr).startswith("sharded_tables.py: expected torch, ")


def test_load_from_disk_with_hot_rows(run):
    words = ("tables", "load", "store", "--placement", "disk", "--json")
    held = {}
    for gib in ("0", "0.001"):
        code, out, err = run(*words, "--hot-gib", gib)
        assert (code, err) == (0, "")
        held[gib] = [one["num_bytes"] for one in json.loads(out)["tables"].values()]
    assert all(some > none for none, some in zip(*held.values(), strict=True))
    code, out, err = run("tables", "load", "store", "--hot-gib", "1")
    assert (code, out) == (2, "")
    assert only_line(err).endswith("expected with placement disk or with hot_rows, found host")


@pytest.mark.multiproc
def test_bench(tmp_path, capsys):
    """That it measures what it says and cleans up; never how fast anything is."""
    words = ["--table-gb", "0.05", "--file-gb", "0.01", "--ranks", "2", "--dir", str(tmp_path)]
    assert cli.main(["bench", "tables", *words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [one["name"] for one in figures][:3] == [
        "load, 2 ranks, warm cache",
        "memory of 2 ranks",
        "restart beside a keeper",
    ]
    # With a GPU, how long registration takes is shown apart.
    assert [one["name"] for one in figures][3:] in ([], ["  registering with the GPU"])
    assert all(one["value"] > 0 for one in figures)
    assert list(tmp_path.iterdir()) == []
    assert [one for one in find_holders() if one.name.startswith("bench-")] == []
