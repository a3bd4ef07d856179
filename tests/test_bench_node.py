# SPDX-License-Identifier: Apache-2.0
"""`bench node`, by small tables: all ranks look up alone and at once, and outlive one of them."""

import json

import pytest

from trtllm_engram.runtime.cli import main

RANKS, GB = 3, 0.05


def bench(capsys, *words):
    assert main(["bench", "node", "--ranks", str(RANKS), "--table-gb", str(GB), *words]) == 0
    return capsys.readouterr().out


def check(found, tokens):
    assert [rate["tokens"] for rate in found["rates"]] == tokens
    for rate in found["rates"]:
        assert rate["alone"] > 0
        assert len(rate["together"]) == RANKS
        assert min(rate["together"]) > 0
    assert found["killed"]["rank"] == RANKS - 1
    assert len(found["killed"]["lookups_of_the_others"]) == RANKS - 1
    assert found["table_bytes"] == pytest.approx(GB * 1e9, rel=0.25)


@pytest.mark.multiproc
def test_one_copy(tmp_path, capsys):
    """Every rank has all of it; the file is what --json prints."""
    file = tmp_path / "node.json"
    words = ["--tokens", "1,64", "--memory", "shm", "--json", "--output", str(file)]
    found = json.loads(bench(capsys, *words))
    check(found, [1, 64])
    assert found["bytes_by_rank"] == [found["table_bytes"]] * RANKS
    assert json.loads(file.read_text(encoding="utf-8")) == found


@pytest.mark.multiproc
def test_what_it_prints(capsys):
    text = bench(capsys, "--tokens", "64")
    assert "table" in text
    assert "memfd" in text
    assert f"rank {RANKS - 1}; the others made " in text


@pytest.mark.gpu
@pytest.mark.multiproc
@pytest.mark.parametrize("memory", ["memfd", "shm", "cumem"])
def test_on_a_gpu(capsys, memory):
    found = json.loads(bench(capsys, "--tokens", "1,512", "--memory", memory, "--json"))
    check(found, [1, 512])
    assert found["gpus"] >= 1


@pytest.mark.gpu
@pytest.mark.multiproc
def test_a_part_each(capsys):
    words = ["--tokens", "64", "--placement", "device_sharded", "--json"]
    found = json.loads(bench(capsys, *words))
    check(found, [64])
    assert sum(found["bytes_by_rank"]) == found["table_bytes"]
    assert max(found["bytes_by_rank"]) < found["table_bytes"] / 2


def test_memory_is_of_the_host(capsys):
    words = ["--placement", "device_sharded", "--memory", "shm"]
    assert main(["bench", "node", "--ranks", "2", *words]) == 2
    told = "--memory: expected with --placement host, found device_sharded"
    assert told in capsys.readouterr().err
