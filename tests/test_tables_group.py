# SPDX-License-Identifier: Apache-2.0
"""runtime.group: who shares tables, by hand, by a launcher, by torch.distributed or mpi4py.

torch and mpi4py are played by threads that have just the functions asked for; where they are
installed, the real ones are asked too."""

from __future__ import annotations

import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import PATIENCE

from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import group as group_module
from trtllm_engram.runtime.group import Group
from trtllm_engram.runtime.tables import to_toml


class World:
    """Ranks that are threads; each knows its own number and its node."""

    def __init__(self, nodes: list[str]) -> None:
        self.nodes = nodes
        self._rank = threading.local()
        self._objects = [None] * len(nodes)
        self._barrier = threading.Barrier(len(nodes), timeout=PATIENCE)

    def run(self, work):
        def play(rank):
            self._rank.number = rank
            return work()

        with ThreadPoolExecutor(len(self.nodes)) as pool:
            return list(pool.map(play, range(len(self.nodes))))

    @property
    def rank(self) -> int:
        return self._rank.number

    def gather(self, given):
        self._objects[self.rank] = given
        self._barrier.wait()
        return list(self._objects)


@pytest.fixture
def make_world(monkeypatch):
    def make(nodes):
        world = World(nodes)
        names = iter(f"{number:x}" for number in range(100))
        lock = threading.Lock()

        def identity():
            with lock:
                return world.nodes[world.rank], next(names)

        monkeypatch.setattr(group_module, "_identity", identity)
        return world

    return make


def torch_distributed(world):
    """As torch.distributed has them; the only process group is None."""

    def all_gather_object(object_list, obj, group=None):
        assert group is None
        assert len(object_list) == len(world.nodes)
        object_list[:] = world.gather(obj)

    return types.SimpleNamespace(
        get_world_size=lambda group=None: len(world.nodes),
        get_rank=lambda group=None: world.rank,
        all_gather_object=all_gather_object,
    )


def mpi_communicator(world):
    """As mpi4py.MPI.Intracomm has them."""
    return types.SimpleNamespace(
        allgather=world.gather,
        Get_rank=lambda: world.rank,
    )


@pytest.mark.parametrize("library", ["torch", "mpi4py"])
@pytest.mark.parametrize(
    ("nodes", "places"),
    [
        ("a", [(0, 1)]),
        ("aaa", [(0, 3), (1, 3), (2, 3)]),
        ("aabb", [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ("abab", [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("abb", [(0, 1), (0, 2), (1, 2)]),
    ],
)
def test_ranks_of_each_node(monkeypatch, make_world, library, nodes, places):
    world = make_world(list(nodes))
    if library == "torch":
        monkeypatch.setitem(sys.modules, "torch.distributed", torch_distributed(world))
        groups = world.run(lambda: Group.of_torch(timeout_s=5))
    else:
        groups = world.run(lambda: Group.of_mpi(mpi_communicator(world), timeout_s=5))
    assert [(one.rank, one.size) for one in groups] == places
    assert {one.timeout_s for one in groups} == {5}
    names = {
        node: {one.name for one, on in zip(groups, nodes, strict=True) if on == node}
        for node in nodes
    }
    assert all(len(of_node) == 1 for of_node in names.values())
    assert len(set().union(*names.values())) == len(names)


def test_a_machine_is_one_node_and_every_call_another_group():
    (node, name), (same, other) = group_module._identity(), group_module._identity()
    assert node == same
    assert node
    assert name != other


def test_a_machine_without_a_boot_id_is_known_by_its_name(tmp_path):
    node, _ = group_module._identity(tmp_path)
    assert node


def test_the_real_torch(tmp_path):
    dist = pytest.importorskip("torch.distributed", reason="torch is not installed")
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        made = Group.of_torch()
    finally:
        dist.destroy_process_group()
    assert (made.rank, made.size) == (0, 1)


def test_the_real_mpi():
    mpi = pytest.importorskip("mpi4py.MPI", reason="mpi4py is not installed", exc_type=ImportError)
    made = Group.of_mpi(mpi.COMM_SELF)
    assert (made.rank, made.size) == (0, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rank": 0}, "expected rank and size, or neither, found rank 0 and size None"),
        ({"size": 2}, "expected rank and size, or neither, found rank None and size 2"),
        ({"rank": 2, "size": 2}, "rank: expected 0 to 1, found 2"),
        ({"rank": -1, "size": 2}, "rank: expected 0 to 1, found -1"),
        ({"rank": 0, "size": 0}, "size: expected at least 1, found 0"),
    ],
)
def test_refused(given, expected):
    with pytest.raises(InputError, match=expected):
        Group(**given)


def test_toml(monkeypatch, tmp_path):
    """Only what was given: the library asks the launcher for the rest."""
    monkeypatch.chdir(tmp_path)
    assert to_toml({}, None) == "format_version = 1"
    assert to_toml({}, Group()) == "format_version = 1\n[group]"
    made = Group('a "b"', 1, 2, socket="s", timeout_s=3, assume_ram=4, keeper="k")
    assert to_toml({}, made).splitlines() == [
        "format_version = 1",
        "[group]",
        r'name = "a \"b\""',
        "rank = 1",
        "size = 2",
        f'socket = "{tmp_path}/s"',
        "timeout_s = 3.0",
        "assume_ram = 4",
        'keeper = "k"',
    ]


LAUNCHERS = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


@pytest.fixture
def no_launcher(monkeypatch):
    for name in sum(LAUNCHERS, ()):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("rank", "size"), LAUNCHERS)
def test_one_rank_of_a_launchers_speaks_for_all(monkeypatch, no_launcher, rank, size):
    assert Group().is_first
    monkeypatch.setenv(size, "2")
    monkeypatch.setenv(rank, "0")
    assert Group().is_first
    monkeypatch.setenv(rank, "1")
    assert not Group().is_first
    assert Group(rank=0, size=2).is_first
    assert not Group(rank=1, size=2).is_first


def test_the_rank_that_speaks_is_the_groups(monkeypatch, no_launcher):
    """Of nested launchers the innermost counts, as where ranks meet."""
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Group().is_first
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert not Group().is_first
