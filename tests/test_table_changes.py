# SPDX-License-Identifier: Apache-2.0
"""A store that changes or is spoilt while ranks load it is every rank's error."""

import os
import re
import signal
from pathlib import Path

import pytest
from checkpoints import shard_of
from engines import small_store, tensor_bytes
from table_ranks import Job, Stop, hold

pytest_plugins = "table_fixtures"
pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("table_changes")]
RANKS = 3


def touch(path):
    os.utime(path)


def overwrite(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def replace(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


CHANGES = {"touched": touch, "overwritten": overwrite, "cut short": cut, "replaced": replace}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("point", ["load.begin", "load.end"])
def test_store_that_changes_while_it_loads(node, tmp_path, change, point):
    """Before its first block is read, or after its last."""
    store = small_store(tmp_path)
    stop = Stop(tmp_path, point, 1)
    ranks = node.ranks(RANKS, {1: stop.environment})
    before = [rank.do("snapshot") for rank in ranks]
    job = Job(tmp_path, store, RANKS)
    job.ask(ranks)
    stop.arrives(ranks[1])
    file = shard_of(tmp_path / "checkpoint", "layers.1.engram.embed.weight")
    CHANGES[change](file)
    ranks[1].signal(signal.SIGCONT)
    for rank in ranks:
        assert file.name in rank.refused().error
    hold(ranks, before)


@pytest.mark.parametrize("verify", [True, False])
def test_bad_block(node, tmp_path, verify):
    """Where sums are checked, every rank learns of the block that one of them found."""
    store = small_store(tmp_path)
    values = tensor_bytes(tmp_path / "checkpoint", "1.engram.embed.weight")
    file = Path(values.filename)
    stat = file.stat()
    values[3, 7] ^= 0x40
    values.flush()
    del values
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    ranks = node.ranks(RANKS)
    job = Job(tmp_path, store, RANKS, verify=verify)
    if not verify:
        job.bind(ranks)
        ranks[0].ask("verify", name="table_1")
        assert "is wrong" in ranks[0].answer().error
        return
    before = [rank.do("snapshot") for rank in ranks]
    job.ask(ranks)
    for rank in ranks:
        error = rank.refused().error
        assert re.search(rf"rank \d: .*{file.name}: block 0 of .*expected sum \w+, found", error)
    hold(ranks, before)
