# SPDX-License-Identifier: Apache-2.0
"""`tables load`, `serve`, `status`, `stop` and what shows them: the example and the benchmark."""

from __future__ import annotations

import json
import os
import re
import secrets

import pytest
from command_line import only_line
from table_holders import TABLE, holder

from trtllm_engram.runtime import cli, open_store
from trtllm_engram.runtime.tables import describe_tables

pytest_plugins = ["command_line_fixtures"]
ACTIONS = ("load", "status", "serve", "stop", "count")
LAYERS = {"engram_1": 1, "engram_5": 5}


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


def test_load_from_disk_with_hot_rows(run):
    words = ("tables", "load", "store", "--placement", "disk", "--json")
    held = {}
    for gib in ("0", "0.001"):
        code, out, err = run(*words, "--hot-gib", gib)
        assert (code, err) == (0, "")
        held[gib] = [one["num_bytes"] for one in json.loads(out)["tables"].values()]
    assert all(some > none for none, some in zip(*held.values(), strict=True))
    code, out, err = run("tables", "load", "store", "--placement", "device", "--hot-gib", "1")
    assert (code, out) == (2, "")
    assert only_line(err).endswith("hot_gib: expected with placement host or disk, found device")
