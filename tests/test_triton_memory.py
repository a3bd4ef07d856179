# SPDX-License-Identifier: Apache-2.0
"""What models on a real tritonserver share, and what they and the benchmark count and weigh."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter

import numpy as np
import pytest
from command_line import COMMAND
from process_memory import table_memory
from triton_asking import IDS, LAYERS, ask, ids_of, same, table_bytes, write_model
from triton_server import MARKS, client
from waiting import wait_until

from trtllm_engram.runtime import Group, Tables
from trtllm_engram.runtime.cli import main
from trtllm_engram.runtime.pieces import Piece

pytest_plugins = ["triton_fixtures"]
pytestmark = MARKS
MODELS = ("engram", "turns")


def metric(server, name, **labels):
    """Sum over the instances."""
    lines = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", server.metrics(), re.MULTILINE)
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    return sum(float(value) for given, value in lines if wanted <= set(given.split(",")))


def test_metrics_are_tritons_own(server, store, expected):
    ids = ids_of(expected, store)
    connection = server.connect("grpc")
    model = {"model": "engram", "version": "1"}  # as Triton's own metrics have it
    names = ("lookups", "rows", "rows_unique", "lookup_seconds", "errors")

    def look():
        server_has = {name: metric(server, f"engram_{name}_total", **model) for name in names}
        return server_has | {"in 5": metric(server, "engram_rows_total", table="engram_5", **model)}

    before = look()
    ask(connection, {"token_ids": ids[None]}, ["layers.5.rows"])
    with pytest.raises(client("grpc").InferenceServerException):
        ask(connection, {"token_ids": -1 - IDS}, ["layers.5.rows"])
    made = {name: value - before[name] for name, value in look().items()}
    unique = [np.unique(expected[f"layers.{layer}.hash_ids"]).size for layer in LAYERS]
    assert made.pop("lookup_seconds") > 0
    assert made == {
        "lookups": 2,
        "rows": 2 * ids.size * 4,
        "rows_unique": sum(unique),
        "errors": 1,
        "in 5": ids.size * 4,
    }
    shared = metric(server, "engram_table_bytes", place="host", **model)
    assert shared == 2 * table_bytes(store)  # as each of the two instances maps it


def test_two_instances_share_one_table(server, store):
    """Both models have two: the memory of all four is that of two tables."""
    wait_until(lambda: len(server.stubs()) == 4, server.stubs)
    stubs = server.stubs()
    assert_shared(stubs, 2, 2 * table_bytes(store))


def assert_shared(pids, num_sharing, num_bytes):
    """The same memory lies in so many of the processes each, and has so many bytes in all."""
    mapped = [table_memory(pid) for pid in pids]
    holders = Counter(inode for each in mapped for inode in each)
    assert set(holders.values()) == {num_sharing}
    memory = {inode: size for each in mapped for inode, size in each.items()}
    assert sum(memory.values()) == pytest.approx(num_bytes, rel=0.02)


def test_a_keepers_table_is_everybodys(server, store, folder):
    """One copy for a keeper, a model's two instances and this process; it outlives the keeper."""
    keeper = f"triton-{folder.name}"
    command = [*COMMAND, "tables", "serve", str(store.path), "--name", keeper]
    options = ["--memory", "keeper", "--keeper", keeper]
    write_model(store, folder / "models", "--name", "kept", "--instances", "2", *options)
    connection = server.connect("http")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline()
            before = set(server.stubs())
            connection.load_model("kept")
            stubs = [pid for pid in server.stubs() if pid not in before]
            assert len(stubs) == 2
            with Tables.of_store(store, group=Group(keeper=keeper), memory="keeper"):
                assert_shared([process.pid, os.getpid(), *stubs], 4, table_bytes(store))
        finally:
            process.terminate()
    assert ask(connection, {"token_ids": IDS}, ["layers.1.rows"], "kept")
    assert_shared(stubs, 2, table_bytes(store))
    connection.unload_model("kept")


def bench(server, capsys, *options):
    """`bench serving` for a second: (exit code, what it says)."""
    client("http")
    where = [f"--{protocol}={url}" for protocol, url in server.urls.items()]
    words = ["--pid", server.process.pid, "--seconds", "1", "--json", *where, *options]
    code = main(["bench", "serving", *map(str, words)])
    return code, json.loads(capsys.readouterr().out)


def test_the_benchmark_checks_and_weighs(server, capsys):
    wait_until(
        lambda: len(server.stubs()) == 4, server.stubs
    )  # those of a model just unloaded end in a while
    code, found = bench(server, capsys, "--sequence-model", "turns")
    assert (code, found["errors"]) == (0, [])
    assert all(kind["requests"] > 0 for kind in found["kinds"])
    assert len(found["kinds"]) == 5
    assert found["memory"][-1]["pss"] == pytest.approx(server.pss(), rel=0.25)


def test_the_benchmark_finds_a_wrong_bit(server, capsys, monkeypatch):
    def wrong(piece):
        return np.roll(piece.token_ids, 1)[: piece.lookback_ids.size]

    monkeypatch.setattr(Piece, "next_lookback_ids", property(wrong))
    code, found = bench(server, capsys)
    assert code == 1
    assert "next_lookback_ids: expected the reference's bits" in found["errors"][0]


def test_rows_on_disk(server, store, expected, folder):
    """As `run` has them, and counted: those that were read before are found in RAM."""
    options = ["--placement", "disk", "--hot-gib", "0.01"]
    write_model(store, folder / "models", "--name", "disk", *options)
    connection = server.connect("grpc")
    connection.load_model("disk")
    ids = ids_of(expected, store)
    wanted = expected["layers.1.rows"]

    num_rows = len(LAYERS) * ids.size * 4
    asked, counted = [], []

    def is_counted():
        """Tables are looked at once a second at most, with the answers of a batch."""
        answer = ask(connection, {"token_ids": ids[None]}, ["layers.1.rows"], "disk")
        assert same(answer["layers.1.rows"][0], wanted)
        asked.append(num_rows)
        names = ("hot_rows", "disk_rows", "disk_reads")
        counted[:] = [metric(server, f"engram_{name}_total", model="disk") for name in names]
        return counted[0] + counted[1] == sum(asked)

    wait_until(is_counted, lambda: (counted, asked))
    _, read, reads = counted
    assert 0 < read <= num_rows
    assert 0 < reads <= 2 * read
    wait_until(is_counted, lambda: (counted, asked))
    assert counted[1:] == [read, reads]
    connection.unload_model("disk")
