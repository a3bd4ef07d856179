# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed, interrupted or misled while tables are bound: the others raise in time or
go on, and nothing stays behind."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from checkout import ROOT
from checkpoints import shard_of
from engines import small_store, tensor_bytes
from process_memory import own_bytes, table_memory
from table_machine import points_library
from table_ranks import DEATH_SECONDS, Job, Node, Stop, hold, made_up_store
from waiting import NEVER, assert_soon, in_time, wait_until

pytest_plugins = "table_fixtures"
pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("table_faults")]
RANKS = 3


def listed_points():
    """The one list of points, in points.h."""
    header = (ROOT / "cpp/src/table/points.h").read_text(encoding="utf-8")
    body = re.search(r"kStopPoints\[\] = \{(.*?)\};", header, re.DOTALL)[1]
    return re.findall(r'"([a-z_.]+)"', body)


# Which ranks come by a point of a bind, and whether the others still need the rank there: they
# raise, or have their tables and go on. Of one that has not yet connected nobody can know.
FIRST, OTHER, EACH, LAST = (0,), (1,), (0, 1), (RANKS - 1,)
RAISES, GOES_ON = "the others raise", "the others go on"
NEVER_CAME = "the others raise after their timeout"
BIND_POINTS = {
    "group.listen": (FIRST, RAISES),
    "group.connect": (OTHER, NEVER_CAME),
    "group.accepted": (FIRST, RAISES),
    "group.hello": (OTHER, RAISES),
    "group.met": (EACH, RAISES),
    "group.send_part": (EACH, RAISES),
    "group.parts": (EACH, RAISES),
    "group.close": (EACH, GOES_ON),
    "bind.vote": (EACH, RAISES),
    "bind.plan": (EACH, RAISES),
    "allocate.create": (FIRST, RAISES),
    "allocate.send": (FIRST, RAISES),
    "attach.map": (OTHER, RAISES),
    "attach.mapped": (OTHER, RAISES),
    "prefault.begin": (EACH, RAISES),
    "prefault.touch": (LAST, RAISES),
    "prefault.end": (EACH, RAISES),
    "load.begin": (EACH, RAISES),
    "load.block": (EACH, RAISES),
    "load.verify": (EACH, RAISES),
    "load.end": (EACH, RAISES),
    "bind.unchanged": (EACH, RAISES),
    "register.begin": (EACH, RAISES),
    "register.end": (EACH, RAISES),
    "record.write": (EACH, RAISES),
    "bind.done": (EACH, GOES_ON),
}
# Where the others may still be on their way: who has not connected cannot see a death.
MEETING_POINTS = ["group.listen", "group.accepted", "group.hello"]
UNBIND_POINTS = ["unbind.unregister", "unbind.unmap", "unbind.end"]
# Of test_table_keeper.py.
KEEPER_POINTS = [
    "keeper.listen",
    "keeper.serving",
    "keeper.accepted",
    "keeper.send",
    "keeper.attach",
    "keeper.attached",
    "keeper.stop",
]
BIND_CASES = [(name, rank) for name, (ranks, _) in BIND_POINTS.items() for rank in ranks]


def test_every_point_has_its_test():
    points = listed_points()
    assert len(points) >= 20
    assert sorted(points) == sorted([*BIND_POINTS, *UNBIND_POINTS, *KEEPER_POINTS])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("faults"))


def test_the_library_is_the_sessions_own():
    """Another session that builds it anew harms no process of this one."""
    built = ROOT / "build/sanitize/libtrtllm_engram.so"
    library = points_library()
    assert not library.samefile(built)
    assert library.read_bytes() == built.read_bytes()


@pytest.fixture(scope="module")
def shared_node():
    with Node(points_library()) as node:
        yield node


@pytest.fixture(scope="module")
def release_node():
    """With the library as it is installed: a sanitizer uses memory of its own."""
    with Node() as node:
        yield node


@pytest.mark.parametrize(("point", "victim"), BIND_CASES)
@in_time
def test_killed_while_binding(node, store, tmp_path, point, victim):
    names = node.look()
    stop = Stop(tmp_path, point, victim)
    ranks = node.ranks(RANKS, {victim: stop.environment})
    survivors = [rank for rank in ranks if rank.rank != victim]
    before = [rank.do("snapshot") for rank in survivors]
    outcome = BIND_POINTS[point][1]
    timeout = 6.0 if outcome == NEVER_CAME else NEVER
    job = Job(tmp_path, store, RANKS, group={"timeout_s": timeout}, verify=True)
    job.ask(ranks)
    stop.arrives(ranks[victim])
    if point in MEETING_POINTS:
        for rank in survivors:
            rank.connects(RANKS)
    killed = ranks[victim].kill()
    answers = [rank.answer() for rank in survivors]
    assert_soon(max(answer.at for answer in answers) - killed, DEATH_SECONDS)
    if outcome != GOES_ON:
        for answer in answers:
            assert answer.kind == "EngramError", answer
            assert f"rank {victim}" in answer.error, answer
        assert len({answer.error for answer in answers}) == 1
    else:
        assert [answer.kind for answer in answers] == [""] * len(answers), answers
        job.verify(survivors)
        for rank in survivors:
            rank.do("close")
    hold(survivors, before)
    node.settles(names)
    # The same processes bind again, with a new rank in the place of the dead one.
    replacement = node.start(victim)
    job.bind([replacement, *survivors])
    job.verify([replacement, *survivors])


@pytest.mark.parametrize("point", ["group.listen", "group.accepted", "group.met", "bind.vote"])
@in_time
def test_killed_with_a_path_socket(node, store, tmp_path, point):
    """The file of a rank 0 that was killed does not outlive the others' errors."""
    path = tmp_path / "socket"
    stop = Stop(tmp_path, point, 0)
    ranks = node.ranks(RANKS, {0: stop.environment})
    job = Job(tmp_path, store, RANKS, group={"socket": str(path)})
    job.ask(ranks)
    stop.arrives(ranks[0])
    if point in MEETING_POINTS:
        for rank in ranks[1:]:
            rank.connects(RANKS)
    killed = ranks[0].kill()
    for rank in ranks[1:]:
        assert_soon(rank.refused().at - killed, DEATH_SECONDS)
    assert not path.exists()
    replacement = node.start(0)
    job.bind([replacement, *ranks[1:]])


@in_time
def test_all_others_killed(node, store, tmp_path):
    """At once, rank 0 among them."""
    stop = Stop(tmp_path, "load.block", 1)
    ranks = node.ranks(RANKS, {1: stop.environment})
    before = [ranks[2].do("snapshot")]
    Job(tmp_path, store, RANKS).ask(ranks)
    stop.arrives(ranks[1])
    for rank in ranks[:2]:
        rank.signal(signal.SIGKILL)
    killed = time.monotonic()
    answer = ranks[2].refused()
    assert "rank 0" in answer.error
    assert_soon(answer.at - killed, DEATH_SECONDS)
    hold(ranks[2:], before)


@in_time
def test_killed_at_any_time(release_node, store, tmp_path):
    """Between the points, too. Who has not raised has the whole table."""
    node = release_node
    times = random.Random(11)
    names = node.look()
    for turn in range(12):
        ranks = node.ranks(RANKS)
        before = [rank.do("snapshot") for rank in ranks]
        victim = turn % RANKS
        job = Job(tmp_path, store, RANKS, layers=(1, 5), group={"timeout_s": 5.0})
        job.ask(ranks)
        time.sleep(times.uniform(0, 0.15))
        killed = ranks[victim].kill()
        for rank in ranks:
            if rank.rank == victim:
                continue
            answer = rank.answer()
            assert_soon(answer.at - killed, DEATH_SECONDS)
            if answer.kind:
                assert f"rank {victim}" in answer.error
            else:
                job.verify([rank])
                rank.do("close")
            rank.holds(before[rank.rank])
        node.end_processes()
        node.settles(names)


@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize("point", UNBIND_POINTS)
def test_killed_while_unbinding(node, store, tmp_path, point, victim):
    """What the others have is theirs."""
    stop = Stop(tmp_path, point, victim)
    ranks = node.ranks(RANKS, {victim: stop.environment})
    job = Job(tmp_path, store, RANKS)
    job.bind(ranks)
    ranks[victim].ask("close")
    stop.arrives(ranks[victim])
    ranks[victim].kill()
    survivors = [rank for rank in ranks if rank.rank != victim]
    job.verify(survivors)
    for rank in survivors:
        rank.do("close")


@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize("kind", ["memfd", "shm"])
def test_killed_with_a_table(node, store, tmp_path, kind, victim):
    """Long after loading; rank 0, which made the memory, or another one."""
    ranks = node.ranks(RANKS)
    job = Job(tmp_path, store, RANKS, memory=kind)
    job.bind(ranks)
    ranks[victim].kill()
    survivors = [rank for rank in ranks if rank.rank != victim]
    job.verify(survivors)
    for rank in survivors:
        assert rank.end() == 0


@pytest.mark.parametrize("victim", [0, 1])
@in_time
def test_stopped_rank(node, store, tmp_path, victim):
    """A rank that does nothing any more counts as dead after the timeout; once it goes on, it
    learns that it is alone."""
    timeout = 6.0
    stop = Stop(tmp_path, "load.block", victim)
    ranks = node.ranks(RANKS, {victim: stop.environment})
    job = Job(tmp_path, store, RANKS, group={"timeout_s": timeout})
    job.ask(ranks)
    stop.arrives(ranks[victim])
    stopped = time.monotonic()
    for rank in ranks:
        if rank.rank != victim:
            answer = rank.refused()
            assert f"rank {victim}" in answer.error
            assert_soon(answer.at - stopped, timeout + DEATH_SECONDS)
    ranks[victim].signal(signal.SIGCONT)
    ranks[victim].refused()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@in_time
def test_signal_while_loading(node, store, tmp_path, number, victim):
    """SIGTERM ends its process, SIGINT raises KeyboardInterrupt there; the others raise at once."""
    other = 1 - victim  # ranks 0 and 1 have the small table's two blocks
    stop = Stop(tmp_path, "load.block", other)  # loading lasts until it goes on
    ranks = node.ranks(RANKS, {other: stop.environment})
    before = [rank.do("snapshot") for rank in ranks]
    job = Job(tmp_path, store, RANKS)
    handled = tmp_path / f"handled-{job.group['name']}"
    ranks[victim].do("note_interrupts", path=str(handled))
    job.ask(ranks)
    stop.arrives(ranks[other])
    ranks[victim].signal(number)
    sent = time.monotonic()
    if number == signal.SIGTERM:
        assert ranks[victim].wait() == -signal.SIGTERM
    else:
        wait_until(handled.exists)
        time.sleep(0.5)  # and has told the library; the rest of loading takes no longer
    ranks[other].signal(signal.SIGCONT)
    survivors = [rank for rank in ranks if rank.rank != victim]
    for rank in survivors:
        answer = rank.refused()
        assert f"rank {victim}" in answer.error
        assert_soon(answer.at - sent, DEATH_SECONDS)
    if number == signal.SIGINT:
        assert ranks[victim].answer().kind == "KeyboardInterrupt"
        survivors = ranks
    hold(survivors, [before[rank.rank] for rank in survivors])


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


@pytest.mark.parametrize("kind", ["memfd", "shm", "private"])
def test_fork_after_load(node, store, tmp_path, kind):
    """A child reads its parent's table, frees it for itself and ends; the parent keeps it."""
    ranks = node.ranks(2)
    job = Job(tmp_path, store, 2, memory=kind)
    job.bind(ranks)
    for rank in ranks:
        assert rank.do("fork", name="table_1") == 0
    job.verify(ranks)


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
