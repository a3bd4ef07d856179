# SPDX-License-Identifier: Apache-2.0
"""bench: that it measures what it says and cleans up; never how fast anything is."""

from __future__ import annotations

import json

import pytest

from trtllm_engram.plugins.errors import EngramError
from trtllm_engram.runtime import ops
from trtllm_engram.runtime.bench import measure
from trtllm_engram.runtime.bench import ops as bench_ops
from trtllm_engram.runtime.cli import main

SMALL = ["bench", "ops", "--table-gb", "0.01", "--file-gb", "0.01"]


def test_contenders_take_turns():
    calls = []
    times = measure.median_seconds(
        [lambda turn: calls.append(("a", turn)), lambda turn: calls.append(("b", turn))],
        turns=2,
        before=lambda: calls.append("cold"),
    )
    assert calls == ["cold", ("a", 0), "cold", ("b", 0), "cold", ("a", 1), "cold", ("b", 1)]
    assert len(times) == 2


def test_ops_as_json(tmp_path, capsys):
    assert main([*SMALL, "--dir", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in document["measurements"]]
    assert names == [
        *["lookup to BF16"] * 2,
        *["lookup packed"] * 2,
        "hash, each core",
        "prepare, checksums",
        "prepare --copy",
    ]
    assert all(one["rate"] > 0 and one["share"] > 0 for one in document["measurements"])
    lookups = [(one["ceiling"], one["target"]) for one in document["measurements"][:4]]
    assert lookups == [("random reads", 0.7), ("and writes", None)] * 2
    assert list(tmp_path.iterdir()) == []


def test_ops_as_a_table(tmp_path, capsys):
    assert main([*SMALL, "--dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("lookup to BF16") and "rows/s" in line for line in lines)
    assert max(map(len, lines)) <= 80 or str(tmp_path) in "".join(lines)


def test_disk_as_json(tmp_path, capsys):
    argv = ["bench", "lookup", "--place", "disk", "--file-gb", "0.01", "--tokens", "3", "--json"]
    assert main([*argv, "--dir", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    names = [one["name"].partition(":")[0] for one in document["measurements"]]
    assert names == ["T = 3, scales in RAM", "T = 3, scales on disk"]
    assert all(one["rate"] > 0 and one["share"] > 0 for one in document["measurements"])
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_result_is_not_timed(monkeypatch):
    right = ops.lookup
    monkeypatch.setattr(ops, "lookup", lambda *args, **options: right(*args, **options) + 1)
    with pytest.raises(EngramError, match=r"^lookup: expected the rows"):
        bench_ops.bench_lookup(1 << 20)
