# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed or interrupted while tables are bound: the others raise in time or
go on, and nothing stays behind."""

import random
import re
import signal
import time

import pytest
from checkout import ROOT
from engines import small_store
from table_machine import points_library
from table_ranks import DEATH_SECONDS, Job, Stop, hold
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
FIRST, OTHER, EACH = (0,), (1,), (0, 1)
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
    "load.begin": (EACH, RAISES),
    "load.block": (EACH, RAISES),
    "prefault.touch": (EACH, RAISES),
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
# Of test_table_keeper_deaths.py.
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
