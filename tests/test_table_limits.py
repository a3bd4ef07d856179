# SPDX-License-Identifier: Apache-2.0
"""Machines that have too little of something: told with numbers, on all ranks, before anything is
allocated where it can be known, and never by a signal."""

import os
import re
import signal
from pathlib import Path

import pytest
from engines import small_store
from table_machine import cgroup, needs_namespaces, points_library
from table_ranks import Job, Node, Stop, hold, made_up_store
from waiting import wait_until

from trtllm_engram.runtime.machine import huge_pages

pytest_plugins = "table_fixtures"
pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("table_limits")]
MIB = 1 << 20
BYTES = 96 * MIB  # of the table
RANKS = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return made_up_store(tmp_path_factory.mktemp("limits"), BYTES)


@pytest.fixture(scope="module")
def shared_node():
    """A container-like one: its /dev/shm has 64 MiB. With the library as it is installed:
    sanitizers need descriptors and memory of their own."""
    with Node(shm="64m") as node:
        yield node


@pytest.fixture(scope="module")
def points_node():
    with Node(points_library(), shm="64m") as node:
        yield node


def large_job(folder, store, size=RANKS, **options):
    return Job(folder, store, size, formula_seed=3, **options)


def verify(job, ranks):
    for rank in ranks:
        rank.ask("verify", name="table_1", seed=3)
    for rank in ranks:
        assert rank.result() > BYTES * 0.99


def refused_alike(ranks):
    """The one error of all ranks, which left nothing in them."""
    texts = {rank.refused().error for rank in ranks}
    assert len(texts) == 1, texts
    return texts.pop()


def numbers_in(text):
    return [int(number) for number in re.findall(r"\d{6,}", text.replace(",", ""))]


@needs_namespaces
def test_memfd_needs_no_shm(node, store, tmp_path):
    """A container's 64 MiB do not bound it."""
    ranks = node.ranks(RANKS)
    job = large_job(tmp_path, store, memory="memfd")
    job.bind(ranks)
    verify(job, ranks)


@needs_namespaces
def test_shm_too_small(node, store, tmp_path):
    """What is needed, what is there, and which limit."""
    ranks = node.ranks(RANKS)
    before = [rank.do("snapshot") for rank in ranks]
    job = large_job(tmp_path, store, memory="shm")
    job.ask(ranks)
    error = refused_alike(ranks)
    assert re.search(r"in /dev/shm \(\d+ bytes in all\)", error), error  # nothing was filled first
    assert 64 * MIB in numbers_in(error), error
    assert any(abs(number - BYTES) < BYTES // 20 for number in numbers_in(error)), error
    hold(ranks, before)


@needs_namespaces
def test_shm_that_others_fill(node, tmp_path):
    """What is free counts, not how large it is."""
    store = made_up_store(tmp_path / "store", 40 * MIB)
    ranks = node.ranks(RANKS)
    job = large_job(tmp_path, store, memory="shm")
    ranks[0].do("fill", path="/dev/shm/other", num_bytes=30 * MIB)
    try:
        job.ask(ranks)
        error = refused_alike(ranks)
        assert 34 * MIB in numbers_in(error), error
    finally:
        ranks[0].do("shell", command="rm /dev/shm/other")
    job.bind(ranks)


@needs_namespaces
@pytest.mark.parametrize("point", ["allocate.create", "load.begin", "prefault.touch"])
def test_shm_that_fills_meanwhile(points_node, tmp_path, point):
    """After the ranks have looked: an error of all, no SIGBUS; or it was reserved by then."""
    node = points_node
    before = node.look()
    store = made_up_store(tmp_path / "store", 40 * MIB)
    victim = 0 if point == "allocate.create" else 1
    stop = Stop(tmp_path, point, victim)
    ranks = node.ranks(RANKS, {victim: stop.environment})
    job = large_job(tmp_path, store, memory="shm")
    job.ask(ranks)
    stop.arrives(ranks[victim])
    other = node.start()
    other.ask("fill", path="/dev/shm/other", num_bytes=50 * MIB)
    other.answer()  # whether or not there was room
    ranks[victim].signal(signal.SIGCONT)
    answers = [rank.answer() for rank in ranks]
    other.do("shell", command="rm -f /dev/shm/other")
    assert len({answer.kind for answer in answers}) == 1, answers
    if answers[0].kind:
        assert all("/dev/shm" in answer.error or "space" in answer.error for answer in answers)
    node.end_processes()
    node.settles(before)


@pytest.mark.parametrize("confined", [(0, 1, 2), (1,)], ids=["all ranks", "rank 1"])
def test_cgroup_too_small(node, store, tmp_path, confined):
    """Nobody is killed for it: the limit is known before."""
    need = BYTES if len(confined) == RANKS else BYTES // RANKS
    with cgroup(need * 3 // 4) as procs:
        ranks = node.ranks(RANKS)
        for rank in confined:
            ranks[rank].do("enter_cgroup", procs=procs)
        job = large_job(tmp_path, store)
        job.ask(ranks)
        error = refused_alike(ranks)
        assert Path(procs).parent.name in error
        assert any(abs(number - need * 3 // 4) < MIB for number in numbers_in(error)), error
        node.end_processes()


def test_cgroup_large_enough(node, store, tmp_path):
    """Limits of each rank are held against what it will touch, not against the table."""
    with cgroup(BYTES * 2 // 3) as procs:
        ranks = node.ranks(RANKS)
        ranks[1].do("enter_cgroup", procs=procs)
        job = large_job(tmp_path, store)
        job.bind(ranks)
        verify(job, ranks)
        node.end_processes()


# Each makes something fail on one rank in its own place; and what that rank says.
RLIMITS = {
    "descriptors": ("RLIMIT_NOFILE", {"more": 0}, "Too many open files"),
    "one descriptor": ("RLIMIT_NOFILE", {"more": 2}, "Too many open files"),
    "three descriptors": ("RLIMIT_NOFILE", {"more": 4}, "Too many open files"),
    "address space": ("RLIMIT_AS", {"most": 0}, "Cannot allocate memory"),
}


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("limit", RLIMITS)
def test_limits_of_one_rank(node, store, tmp_path, limit, victim):
    """Every rank raises, and the text says whose limit it was."""
    name, arguments, cause = RLIMITS[limit]
    ranks = node.ranks(RANKS)
    before = [rank.do("snapshot") for rank in ranks]
    if name == "RLIMIT_AS":
        used = int(Path(f"/proc/{ranks[victim].pid}/statm").read_text().split()[0])
        arguments = {"most": used * os.sysconf("SC_PAGESIZE") + BYTES // 2}
    ranks[victim].do("limit", name=name, **arguments)
    # Without a descriptor a rank cannot tell the others, which wait for it.
    group = {"timeout_s": 5.0} if name == "RLIMIT_NOFILE" else {}
    job = large_job(tmp_path, store, group=group)
    job.ask(ranks)
    texts = [rank.refused().error for rank in ranks]
    assert all(f"rank {victim}: " in text for text in texts), texts
    assert cause in texts[victim]
    hold(ranks, before)


@pytest.mark.parametrize("kind", ["memfd", "shm"])
def test_limit_on_file_sizes(node, tmp_path, kind):
    """Of the rank that makes the files, before it makes any; no other rank makes one."""
    store = made_up_store(tmp_path / "store", 40 * MIB)
    for victim in (1, 0):
        ranks = node.ranks(RANKS)
        before = [rank.do("snapshot") for rank in ranks]
        ranks[victim].do("limit", name="RLIMIT_FSIZE", most=20 * MIB)
        job = large_job(tmp_path, store, memory=kind)
        if victim != 0:
            job.bind(ranks)
            continue
        job.ask(ranks)
        error = refused_alike(ranks)
        assert error.startswith("tables: table_1.values: expected "), error
        assert error.endswith("in the limit on file sizes (ulimit -f) of rank 0"), error
        needed, there = numbers_in(error)
        assert abs(needed - 40 * MIB) < 2 * MIB, error
        assert there == 20 * MIB, error
        hold(ranks, before)


def test_assumed_memory(node, store, tmp_path):
    """assume_ram refuses where MemAvailable would only warn."""
    ranks = node.ranks(RANKS)
    job = large_job(tmp_path, store, group={"assume_ram": 50 * MIB})
    job.ask(ranks)
    error = refused_alike(ranks)
    assert "assume_ram" in error
    assert 50 * MIB in numbers_in(error), error
    job = large_job(tmp_path, store, group={"assume_ram": 1 << 40})
    job.bind(ranks)


@pytest.mark.parametrize("numa", ["local", "interleave", "node:0"])
def test_numa(node, store, tmp_path, numa):
    ranks = node.ranks(2)
    job = large_job(tmp_path, store, 2, numa=numa)
    for tables in job.bind(ranks):
        assert tables["table_1"]["numa"] == numa
    verify(job, ranks)


def test_numa_node_that_is_not_there(node, store, tmp_path):
    ranks = node.ranks(2)
    job = large_job(tmp_path, store, 2, numa="node:63")
    job.ask(ranks)
    assert "63" in refused_alike(ranks)


def test_reserved_pages_too_few(node, store, tmp_path):
    """Pages of 2 MiB that nobody reserved: the numbers say how many are needed."""
    ranks = node.ranks(2)
    free = sum(pool.free for pool in huge_pages() if pool.page_bytes == 2 * MIB)
    if free * 2 * MIB >= BYTES:
        pytest.skip(f"this machine: {free} pages of 2 MiB are reserved")
    job = large_job(tmp_path, store, 2, pages="2m")
    job.ask(ranks)
    error = refused_alike(ranks)
    assert any(abs(number - BYTES) < BYTES // 20 for number in numbers_in(error)), error


def test_reserved_pages(node, store, tmp_path):
    """All of the table lies on them, and all of them are free again afterwards."""
    pages = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
    wanted = BYTES // (2 * MIB) + 8
    reserved = int((pages / "nr_hugepages").read_text())
    try:
        (pages / "nr_hugepages").write_text(str(reserved + wanted))
    except OSError as error:
        pytest.skip(f"this machine: no pages of 2 MiB can be reserved: {error}")
    try:
        free = int((pages / "free_hugepages").read_text())
        if free < wanted:
            pytest.skip(f"this machine: no {wanted} pages of 2 MiB can be reserved")
        ranks = node.ranks(2)
        job = large_job(tmp_path, store, 2, pages="2m")
        for tables in job.bind(ranks):
            about = tables["table_1"]
            assert about["pages"] == "2m"
            assert about["huge_bytes"] >= about["num_bytes"]
        verify(job, ranks)
        ranks[0].kill()
        verify(job, ranks[1:])
        node.end_processes()
        wait_until(lambda: int((pages / "free_hugepages").read_text()) == free)
    finally:
        (pages / "nr_hugepages").write_text(str(reserved))


@pytest.mark.parametrize("kind", ["memfd", "private"])
def test_huge_pages_are_counted(node, store, tmp_path, kind):
    """The share on pages of 2 MiB is what the kernel says."""
    ranks = node.ranks(1)
    (tables,) = large_job(tmp_path, store, 1, memory=kind).bind(ranks)
    about = tables["table_1"]
    assert 0 <= about["huge_bytes"] <= about["num_bytes"] + 4 * MIB
    fields = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")
    rollup = ranks[0].do("rollup")
    assert abs(about["huge_bytes"] - sum(rollup[field] for field in fields)) < 8 * MIB


def test_gpu_memory_without_a_gpu(points_node, store, tmp_path):
    """cumem: one clear line on all ranks. (This library knows no CUDA.)"""
    ranks = points_node.ranks(2)
    before = [rank.do("snapshot") for rank in ranks]
    job = large_job(tmp_path, store, 2, memory="cumem")
    job.ask(ranks)
    error = refused_alike(ranks)
    assert "cumem" in error
    assert "CUDA" in error
    hold(ranks, before)


@needs_namespaces
def test_socket_on_a_full_disk(node, store, tmp_path):
    """Nothing can be created in the folder: all ranks say which."""
    folder = tmp_path / "full"
    folder.mkdir()
    ranks = node.ranks(2)
    mount = f"mount -t tmpfs -o size=64k,nr_inodes=1,mode=755 tmpfs {folder}"
    ranks[0].do("shell", command=mount)
    try:
        group = {"socket": str(folder / "socket"), "timeout_s": 5.0}
        job = large_job(tmp_path, store, 2, group=group)
        job.ask(ranks)
        texts = [rank.refused().error for rank in ranks]
        assert all(str(folder) in text for text in texts), texts
    finally:
        ranks[0].do("shell", command=f"umount {folder}")


@needs_namespaces
def test_store_on_another_file_system(node, tmp_path):
    """A tmpfs has no page cache of its own to pass by."""
    folder = tmp_path / "memory"
    folder.mkdir()
    ranks = node.ranks(2)
    small = small_store(tmp_path)
    ranks[0].do("shell", command=f"mount -t tmpfs -o size=16m,mode=755 tmpfs {folder}")
    try:
        checkpoint = tmp_path / "checkpoint"
        ranks[0].do("shell", command=f"cp -a {checkpoint} {folder}")
        moved = folder / "checkpoint"
        job = Job(tmp_path, small, 2, verify=True, checkpoint=str(moved))
        job.bind(ranks)
        job.verify(ranks)
    finally:
        node.end_processes()
        last = node.start()
        last.do("shell", command=f"umount {folder}")
