# SPDX-License-Identifier: Apache-2.0
"""Tables that are bound, attached and freed again and again leave nothing behind."""

from itertools import pairwise
from pathlib import Path

import pytest
from engines import small_store
from keepers import Keeper, attaching
from table_ranks import Job, hold, write_toml
from waiting import wait_until

pytest_plugins = "table_fixtures"
pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("table_leaks")]
CYCLES = 200
TURNS = 4  # that they are done in, where each is looked at
SMALLEST_CHUNK = 32  # bytes, of malloc


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("leaks"))


def test_attach_cycles_leak_nothing(node, store, tmp_path):
    """Neither here nor in the keeper."""
    keeper = Keeper(node, tmp_path, store)
    keeper.is_ready()
    names, held = node.look(), keeper_descriptors(keeper)  # while nobody is connected
    process = node.ranks(1)[0]
    toml = attaching(tmp_path, store, keeper, size=1, layers=(1, 5)).toml(0)
    process.do("cycles", toml=toml, count=1)
    before = process.do("snapshot")
    process.do("cycles", toml=toml, count=CYCLES)
    process.holds(before)
    node.settles(names)
    wait_until(
        lambda: keeper_descriptors(keeper) == held, lambda: (keeper_descriptors(keeper), held)
    )


@pytest.mark.parametrize("size", [1, 2], ids=["alone", "two ranks"])
@pytest.mark.parametrize("memory", ["keeper", "memfd"])
def test_cycles_leave_the_heap_as_it_was(release_node, store, tmp_path, memory, size):
    """One small object a cycle shows in each turn; what else grows does not do so each time."""
    ranks = release_node.ranks(size)
    if memory == "keeper":
        keeper = Keeper(release_node, tmp_path, store)
        keeper.is_ready()
        job = attaching(tmp_path, store, keeper, size=size, layers=(1, 5))
    else:
        job = Job(tmp_path, store, size, layers=(1, 5), memory=memory)
    heaps = []
    for _ in range(1 + TURNS):  # the first makes what is made once
        for rank in ranks:
            rank.ask("cycles", toml=job.toml(rank.rank), count=CYCLES // TURNS)
        for rank in ranks:
            rank.result()
        heaps.append([rank.do("heap_bytes") for rank in ranks])
    for rank in ranks:
        grown = [after[rank.rank] - before[rank.rank] for before, after in pairwise(heaps)]
        assert min(grown) < CYCLES // TURNS * SMALLEST_CHUNK, grown
    release_node.end_processes()


def keeper_descriptors(keeper):
    folder = Path(f"/proc/{keeper.process.pid}")
    return (len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir())))


@pytest.mark.parametrize("kind", ["memfd", "shm"])
def test_bind_cycles_leak_nothing(node, store, tmp_path, kind):
    """Two ranks that bind and free the same tables again and again."""
    ranks = node.ranks(2)
    names, before = node.look(), [rank.do("snapshot") for rank in ranks]
    job = Job(tmp_path, store, 2, layers=(1, 5), memory=kind)
    for rank in ranks:
        rank.ask("cycles", toml=job.toml(rank.rank), count=CYCLES // 4)
    for rank in ranks:
        rank.result()
    hold(ranks, before)
    node.settles(names)


def test_failed_binds_leak_nothing(node, store, tmp_path):
    process = node.ranks(1)[0]
    toml = write_toml(
        tmp_path / "bad.toml",
        {"mine": {"store": str(store.path), "layer": 1, "expect_content": "0" * 32}},
    )
    before = process.do("snapshot")
    for _ in range(50):
        process.ask("bind", toml=toml)
        process.refused()
    process.holds(before)
