# SPDX-License-Identifier: Apache-2.0
"""One copy of a table for all processes that have it: forks, other programs, and its end."""

import signal

import pytest
from engines import small_store
from process_memory import own_bytes, table_memory, writable_tables
from table_ranks import DEATH_SECONDS, Job, Stop, hold, made_up_store
from waiting import assert_soon, in_time

pytest_plugins = "table_fixtures"
pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("table_memory")]
RANKS = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("kind", ["memfd", "shm", "private"])
def test_fork_after_load(node, store, tmp_path, kind):
    """A child reads its parent's table, frees it for itself and ends; the parent keeps it."""
    ranks = node.ranks(2)
    job = Job(tmp_path, store, 2, memory=kind)
    job.bind(ranks)
    for rank in ranks:
        assert rank.do("fork", name="table_1") == 0
    job.verify(ranks)


@pytest.mark.parametrize("kind", ["memfd", "shm"])
def test_nobody_writes_to_what_is_filled(node, store, tmp_path, kind):
    """A rank that tries ends, and the others' table is as it was."""
    ranks = node.ranks(RANKS)
    job = Job(tmp_path, store, RANKS, memory=kind)
    job.bind(ranks)
    assert [writable_tables(rank.pid) for rank in ranks] == [[]] * RANKS
    ranks[1].ask("spoil", name="table_1")
    with pytest.raises(EOFError):
        ranks[1].answer()
    assert ranks[1].wait() in (-signal.SIGSEGV, 1)  # 1: a sanitizer says so
    job.verify([ranks[0], ranks[2]])


@in_time
def test_child_that_outlives_its_parent(node, store, tmp_path):
    """A forked child that is left over has the group's sockets open: the others see the death."""
    stop = Stop(tmp_path, "load.block", 1)
    ranks = node.ranks(RANKS, {1: stop.environment})
    job = Job(tmp_path, store, RANKS)
    children = tmp_path / "children live"
    children.touch()
    ranks[1].do("fork_soon", while_there=str(children))
    job.ask(ranks)
    stop.arrives(ranks[1])
    killed = ranks[1].kill()
    try:
        for rank in (ranks[0], ranks[2]):
            assert_soon(rank.refused().at - killed, DEATH_SECONDS)
    finally:
        children.unlink()


def test_no_descriptor_reaches_other_programs(node, store, tmp_path):
    """What a rank holds is closed in programs that it starts."""
    ranks = node.ranks(2)
    Job(tmp_path, store, 2).bind(ranks)
    for rank in ranks:
        for path in rank.do("inherited"):
            assert "engram" not in path


@pytest.mark.parametrize("kind", ["memfd", "shm"])
def test_one_copy(release_node, tmp_path, kind):
    """The ranks of a node map the same memory, of one table, and give it all back."""
    node = release_node
    store = made_up_store(tmp_path / "store", 200 << 20)
    ranks = node.ranks(4)
    names = node.look()
    before = [rank.do("snapshot") for rank in ranks]
    own = sum(own_bytes(rank.pid) for rank in ranks)
    job = Job(tmp_path, store, 4, formula_seed=0, memory=kind)
    num_bytes = job.bind(ranks)[0]["table_1"]["num_bytes"]
    for rank in ranks:
        rank.do("touch", name="table_1")
    mapped = [table_memory(rank.pid) for rank in ranks]
    assert all(one == mapped[0] for one in mapped)
    assert sum(mapped[0].values()) == pytest.approx(num_bytes, rel=0.005, abs=4 << 20)
    assert sum(own_bytes(rank.pid) for rank in ranks) - own < num_bytes // 10
    job.verify(ranks)
    ranks[0].kill()
    for rank in ranks[1:3]:
        rank.do("close")
    assert ranks[3].end() == 0
    hold(ranks[1:3], before[1:3])
    node.settles(names)


def test_memory_is_given_back(node, tmp_path):
    """After ranks that were killed with a part of the table loaded."""
    store = made_up_store(tmp_path / "store", 200 << 20)
    stop = Stop(tmp_path, "load.end", 2)
    ranks = node.ranks(RANKS, {2: stop.environment})
    names = node.look()
    before = [rank.do("snapshot") for rank in ranks]
    job = Job(tmp_path, store, RANKS, formula_seed=0)
    job.ask(ranks)
    stop.arrives(ranks[2])
    assert table_memory(ranks[0].pid)
    ranks[2].kill()
    for rank in ranks[:2]:
        rank.refused()
    hold(ranks[:2], before[:2])
    node.settles(names)
