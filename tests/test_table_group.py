# SPDX-License-Identifier: Apache-2.0
"""Tables that the ranks of a node share: who meets whom, in any order and in anybody's way."""

import random
import time

import pytest
from engines import small_store
from table_ranks import DEATH_SECONDS, Job, Node, hold, write_toml
from waiting import assert_soon, in_time

pytest_plugins = "table_fixtures"
pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("table_group")]
KINDS = ["memfd", "shm", "private"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("group"))


@pytest.fixture(scope="module")
def other_store(tmp_path_factory):
    """The same layout, other bytes."""
    return small_store(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def shared_node():
    with Node() as node:
        yield node


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_memory(node, store, tmp_path, kind):
    """Every rank has every byte, and knows what it has and who it is."""
    ranks = node.ranks(3)
    job = Job(tmp_path, store, 3, layers=(1, 5), memory=kind)
    for rank, tables in zip(ranks, job.bind(ranks), strict=True):
        assert sorted(tables) == ["table_1", "table_5"]
        for about in tables.values():
            assert (about["memory"], about["rank"], about["size"]) == (kind, rank.rank, 3)
    job.verify(ranks)


def test_eight_ranks_in_any_order(node, store, tmp_path):
    """By whichever rank comes first, and whichever last."""
    job = Job(tmp_path, store, 8)
    order = random.Random(7)
    ranks = node.ranks(8)
    for _ in range(3):
        order.shuffle(ranks)
        for rank in ranks:
            rank.ask("bind", toml=job.toml(rank.rank))
            time.sleep(order.choice((0, 0.02, 0.1)))
        for rank in ranks:
            rank.result()
        job.verify(ranks)
        for rank in ranks:
            rank.do("close")


@pytest.mark.parametrize("late", [0, 1])
def test_one_rank_late(node, store, tmp_path, late):
    """By 5 seconds; the first one to come waits for the socket as well as for ranks."""
    job = Job(tmp_path, store, 3)
    ranks = node.ranks(3)
    for rank in ranks:
        if rank.rank != late:
            rank.ask("bind", toml=job.toml(rank.rank))
    time.sleep(5)
    ranks[late].ask("bind", toml=job.toml(late))
    for rank in ranks:
        rank.result()
    job.verify(ranks)


@pytest.mark.parametrize("missing", [0, 1, 2])
@in_time
def test_rank_that_never_comes(node, store, tmp_path, missing):
    """The others wait for as long as they were told, then name it."""
    timeout = 6.0
    job = Job(tmp_path, store, 3, group={"timeout_s": timeout})
    ranks = [rank for rank in node.ranks(3) if rank.rank != missing]
    before = [rank.do("snapshot") for rank in ranks]
    began = time.monotonic()
    job.ask(ranks)
    for rank in ranks:
        answer = rank.refused()
        assert timeout * 0.9 <= answer.at - began
        assert_soon(answer.at - began, timeout + DEATH_SECONDS)
        assert f"rank {missing}: never came within 6 s" in answer.error
    hold(ranks, before)


@pytest.mark.parametrize("twice", [0, 1])
def test_rank_that_comes_twice(node, store, tmp_path, twice):
    """Both processes are named to everybody who came; nobody gets a table."""
    job = Job(tmp_path, store, 3, group={"timeout_s": 60.0})  # who comes after their end waits
    ranks = node.ranks(2)
    first, second = (node.start(twice), node.start(twice))
    for process in (first, second):
        process.do("warm_up")
        process.ask("bind", toml=job.toml(twice))
    time.sleep(0.3)  # both are there before the group is whole
    others = [rank for rank in ranks if rank.rank != twice]
    job.ask(others)
    texts = [process.refused().error for process in (first, second)]
    assert any(f"rank {twice}" in text for text in texts)
    assert any(str(first.pid) in text or str(second.pid) in text for text in texts)
    for rank in others:
        rank.refused()


def test_sizes_that_differ(node, store, tmp_path):
    job = Job(tmp_path, store, 3)
    ranks = node.ranks(3)
    for rank in ranks:
        size = 4 if rank.rank == 1 else 3
        rank.ask("bind", toml=job.toml(rank.rank, size=size))
    texts = [rank.refused().error for rank in ranks]
    assert all("rank 1: expected a group of 3" in text and "got 4" in text for text in texts), texts


def test_other_store_version(node, store, other_store, tmp_path):
    """Ranks that would share other tables than they think do not share any."""
    job = Job(tmp_path, store, 3)
    other = Job(tmp_path, other_store, 3, group={"name": job.group["name"]})
    ranks = node.ranks(3)
    before = [rank.do("snapshot") for rank in ranks]
    for rank in ranks:
        rank.ask("bind", toml=(other if rank.rank == 2 else job).toml(rank.rank))
    for rank in ranks:
        error = rank.refused().error
        assert "rank 2" in error
        assert store.manifest.content_id[:8] in error
        assert other_store.manifest.content_id[:8] in error
    hold(ranks, before)


def test_other_tables(node, store, tmp_path):
    """The same for names, layers and placements that are not the same on all ranks."""
    job = Job(tmp_path, store, 2)
    ranks = node.ranks(2)
    for other in (Job(tmp_path, store, 2, layers=(5,)), Job(tmp_path, store, 2, layers=(1, 5))):
        other.group["name"] = job.group["name"]
        ranks[0].ask("bind", toml=job.toml(0))
        ranks[1].ask("bind", toml=other.toml(1))
        texts = {rank.refused().error for rank in ranks}
        assert all("table_5" in text for text in texts), texts


@pytest.mark.parametrize("differs", [True, False])
def test_tables_verified_on_some_ranks(node, store, tmp_path, differs):
    """Ranks deal out the blocks of all tables together: refused where they would do so otherwise,
    right where all verify the same ones of them."""
    job = Job(tmp_path, store, 2, layers=(1, 5))
    ranks = node.ranks(2)
    for rank in ranks:
        for name, table in job.tables.items():
            table["verify"] = name == ("table_5" if differs and rank.rank == 1 else "table_1")
        rank.ask("bind", toml=job.toml(rank.rank))
    if differs:
        texts = {rank.refused().error for rank in ranks}
        assert texts == {
            "tables: rank 1: table 'table_1': verify: expected true as on rank 0, found false; "
            "rank 1: table 'table_5': verify: expected false as on rank 0, found true"
        }
        return
    for rank in ranks:
        rank.result()
    job.verify(ranks)


def test_argument_that_python_refuses(node, store, tmp_path):
    """On one rank, before the library has it: the others do not wait for that rank."""
    job = Job(tmp_path, store, 3)
    ranks = node.ranks(3)
    job.ask([ranks[0], ranks[2]])
    ranks[1].ask("bind_here", group={**job.group, "rank": 1}, **job.tables["table_1"], numa=["gpu"])
    answers = [rank.refused() for rank in ranks]
    assert answers[1].error == "numa: expected text or a number, found ['gpu']"
    for answer in (answers[0], answers[2]):
        assert answer.error.endswith(f"rank 1: {answers[1].error}")


def test_again_after_a_failure(node, store, other_store, tmp_path):
    """A process whose bind failed binds as if nothing had been, with the same name."""
    job = Job(tmp_path, store, 2)
    other = Job(tmp_path, other_store, 2, group={"name": job.group["name"]})
    ranks = node.ranks(2)
    for _ in range(2):
        ranks[0].ask("bind", toml=job.toml(0))
        ranks[1].ask("bind", toml=other.toml(1))
        for rank in ranks:
            rank.refused()
    job.bind(ranks)
    job.verify(ranks)


def test_two_groups(node, store, other_store, tmp_path):
    """Two jobs on a node do not meet, though their ranks come all at once."""
    jobs = [Job(tmp_path, store, 2), Job(tmp_path, other_store, 2)]
    ranks = [node.ranks(2), node.ranks(2)]
    for rank in range(2):
        for job, processes in zip(jobs, ranks, strict=True):
            processes[rank].ask("bind", toml=job.toml(rank))
    for processes, seed in zip(ranks, (0, 1), strict=True):
        for process in processes:
            process.result()
            assert process.do("verify", name="table_1", seed=seed) > 0


LAUNCHERS = {
    "torchrun": ({"LOCAL_RANK": "{rank}", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}),
    "Open MPI": (
        {"OMPI_COMM_WORLD_LOCAL_RANK": "{rank}", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        | {"PMIX_NAMESPACE": "prterun-1@1"}
    ),
    "MPICH": {"MPI_LOCALRANKID": "{rank}", "MPI_LOCALNRANKS": "2"},
    "Slurm": (
        {"SLURM_LOCALID": "{rank}", "SLURM_NTASKS_PER_NODE": "2"}
        | {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "{rank}"}
    ),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(node, store, tmp_path, launcher):
    """Ranks and sizes come from the launcher where no [group] says them."""
    toml = write_toml(tmp_path / "tables.toml", {"mine": {"store": str(store.path), "layer": 1}})
    ranks = []
    for rank in range(2):
        variables = {name: value.format(rank=rank) for name, value in LAUNCHERS[launcher].items()}
        ranks.append(node.start(rank, environment=variables))
        ranks[-1].ask("bind", toml=toml)
    for rank in ranks:
        about = rank.result()["mine"]
        assert (about["rank"], about["size"]) == (rank.rank, 2)
        assert rank.do("verify", name="mine") > 0


def test_half_a_launcher(node, store, tmp_path):
    toml = write_toml(tmp_path / "tables.toml", {"mine": {"store": str(store.path), "layer": 1}})
    rank = node.start(environment={"LOCAL_RANK": "1"})
    rank.ask("bind", toml=toml)
    assert "LOCAL_WORLD_SIZE" in rank.refused().error
