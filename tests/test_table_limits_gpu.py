# SPDX-License-Identifier: Apache-2.0
"""GPUs that have too little memory for tables: told with numbers, on all ranks, before any of it is
taken, on GPUs and on the host."""

import re

import pytest
from table_ranks import Job, hold, made_up_store

pytest_plugins = "table_fixtures"
pytestmark = [pytest.mark.gpu, pytest.mark.multiproc, pytest.mark.xdist_group("table_limits_gpu")]
GIB = 1 << 30
TOO_MUCH = 300 * GIB  # for any GPU, by half and half too
ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0"}
REFUSAL = re.compile(
    r"GPU [0-9A-F:.]+: expected (\d+) bytes \([\d.]+ GiB\) of free memory for the tables of "
    r"(ranks? [\d, ]+), found (\d+) bytes \([\d.]+ GiB\)"
)


@pytest.fixture
def shared_node(release_node):
    return release_node


def refused(ranks, job):
    """The bytes needed, the ranks that need them and the bytes there, of the one error of all."""
    before = [rank.do("snapshot") for rank in ranks]
    job.ask(ranks)
    texts = {rank.refused().error for rank in ranks}
    assert len(texts) == 1, texts
    text = texts.pop()
    found = REFUSAL.fullmatch(text.removeprefix("tables: "))
    assert found, text
    hold(ranks, before)
    return int(found[1]), found[2], int(found[3])


def warm_ranks(node, folder, count):
    """Ranks that have used their GPU, which opens files for good."""
    ranks = node.ranks(count, dict.fromkeys(range(count), ONE_GPU))
    small = Job(folder, made_up_store(folder / "small", 1 << 20), count, formula_seed=1)
    small.bind(ranks)
    for rank in ranks:
        rank.do("close")
    return ranks


@pytest.mark.parametrize("placement", ["device", "device_sharded"])
def test_tables_in_gpu_memory(node, tmp_path, placement):
    store = made_up_store(tmp_path / "store", TOO_MUCH)
    ranks = warm_ranks(node, tmp_path, 2)
    needed, who, there = refused(
        ranks, Job(tmp_path, store, 2, placement=placement, formula_seed=1)
    )
    assert who == "ranks 0, 1"
    times = 2 if placement == "device" else 1
    assert needed == pytest.approx(times * TOO_MUCH, rel=0.01)
    assert 0 < there < needed


def test_scales_of_a_host_table(node, tmp_path):
    """Beside a table that leaves less than they need, but enough for other tests; their values
    would take 400 GiB of RAM."""
    store = made_up_store(tmp_path / "store", 400 * GIB)
    ranks = warm_ranks(node, tmp_path, 2)
    options = {"scales": "device", "formula_seed": 1}
    large = made_up_store(tmp_path / "large", TOO_MUCH)
    everything = {"placement": "device", "scales": "device", "formula_seed": 1}
    _, _, there = refused(ranks, Job(tmp_path, large, 2, **everything))
    other = node.ranks(1, {0: ONE_GPU})
    taken = made_up_store(tmp_path / "taken", there - 20 * GIB)
    # Alone, so that nothing is there before a GPU asks; then all of it.
    Job(tmp_path, taken, 1, **everything).bind(other)
    other[0].do("view", name="table_1")
    needed, who, there = refused(ranks, Job(tmp_path, store, 2, **options))
    assert who == "ranks 0, 1"
    assert needed == pytest.approx(2 * 400 * GIB / 33, rel=0.01)
    assert there < needed


@pytest.mark.gpus
def test_ranks_take_gpus_in_turn(node, tmp_path):
    """Where their threads have chosen none: each is told of its own."""
    store = made_up_store(tmp_path / "store", 2 * TOO_MUCH)
    ranks = node.ranks(2)
    Job(tmp_path, store, 2, placement="device_sharded", formula_seed=1).ask(ranks)
    for rank in ranks:
        error = rank.refused().error
        found = REFUSAL.fullmatch(error.removeprefix("tables: "))
        assert found, error
        assert found[2] in ("rank 0", "rank 1")


def test_hot_rows_of_a_host_table(node, tmp_path):
    """The rows that lookups are to keep count too."""
    ranks = warm_ranks(node, tmp_path, 2)
    table = 100 * GIB
    store = made_up_store(tmp_path / "store", table)
    options = {"hot_gib": 300.0, "formula_seed": 1}
    needed, who, there = refused(ranks, Job(tmp_path, store, 2, **options))
    assert who == "ranks 0, 1"
    # Twice as many slots as rows, each with a word of its own beside the 264 bytes of a row.
    assert needed == pytest.approx(2 * 2 * table * 272 / 264, rel=0.01)
    assert there < needed
