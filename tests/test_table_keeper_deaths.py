# SPDX-License-Identifier: Apache-2.0
"""A keeper or a rank beside it that is killed or interrupted: what the others see, what is left."""

import signal
import time

import pytest
from engines import small_store
from keepers import Keeper, attaching
from table_ranks import DEATH_SECONDS, Stop, hold
from waiting import assert_soon, in_time

pytest_plugins = "table_fixtures"
pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("table_keeper_deaths")]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("keeper"))


def test_keeper_that_dies_harms_nobody(node, store, tmp_path):
    """kill -9: who has attached goes on; a new keeper may take the name; nothing is left."""
    names = node.look()
    keeper = Keeper(node, tmp_path, store)
    keeper.is_ready()
    ranks = node.ranks(2)
    job = attaching(tmp_path, store, keeper)
    job.bind(ranks)
    keeper.process.kill()
    job.verify(ranks)
    job.verify(ranks)
    for rank in ranks:
        rank.do("close")
    node.settles(names)
    other = Keeper(node, tmp_path, store, name=keeper.name)
    other.is_ready()
    job.bind(ranks)
    job.verify(ranks)


# Whether a bind that is under way raises when the keeper dies there.
KILLED_KEEPERS = {"keeper.accepted": True, "keeper.send": True}


@pytest.mark.parametrize("point", ["keeper.listen", "keeper.serving", *KILLED_KEEPERS])
@in_time
def test_keeper_killed_at(node, store, tmp_path, point):
    names = node.look()
    where = Stop(tmp_path, point, "keeper")
    keeper = Keeper(node, tmp_path, store, stop=where)
    ranks = node.ranks(2)
    before = [rank.do("snapshot") for rank in ranks]
    job = attaching(tmp_path, store, keeper)
    if point in KILLED_KEEPERS:
        keeper.is_ready()
    else:
        where.arrives(keeper.process)
    job.ask(ranks)
    if point in KILLED_KEEPERS:
        where.arrives(keeper.process)
    killed = keeper.process.kill()
    for rank in ranks:
        answer = rank.refused()
        assert_soon(answer.at - killed, DEATH_SECONDS)
        assert "keeper" in answer.error
    hold(ranks, before)
    node.settles(names)
    Keeper(node, tmp_path, store, name=keeper.name).is_ready()
    job.bind(ranks)
    job.verify(ranks)


@pytest.mark.parametrize("point", ["prefault.touch", "load.block", "load.verify", "record.write"])
def test_keeper_killed_while_loading(node, store, tmp_path, point):
    names = node.look()
    where = Stop(tmp_path, point, "keeper")
    keeper = Keeper(node, tmp_path, store, "--verify", stop=where)
    where.arrives(keeper.process)
    keeper.process.kill()
    node.settles(names)


def test_keeper_killed_while_it_stops(node, store, tmp_path):
    names = node.look()
    where = Stop(tmp_path, "keeper.stop", "keeper")
    keeper = Keeper(node, tmp_path, store, stop=where)
    keeper.is_ready()
    ranks = node.ranks(2)
    job = attaching(tmp_path, store, keeper)
    job.bind(ranks)
    keeper.process.signal(signal.SIGTERM)
    where.arrives(keeper.process)
    keeper.process.kill()
    job.verify(ranks)
    for rank in ranks:
        rank.do("close")
    node.settles(names)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", ["keeper.attach", "keeper.attached"])
@in_time
def test_rank_killed_while_it_attaches(node, store, tmp_path, point, victim):
    """The others raise; the keeper serves on."""
    keeper = Keeper(node, tmp_path, store)
    keeper.is_ready()
    where = Stop(tmp_path, point, victim)
    ranks = node.ranks(2, {victim: where.environment})
    job = attaching(tmp_path, store, keeper)
    job.ask(ranks)
    where.arrives(ranks[victim])
    killed = ranks[victim].kill()
    survivor = ranks[1 - victim]
    answer = survivor.refused()
    assert f"rank {victim}" in answer.error
    assert_soon(answer.at - killed, DEATH_SECONDS)
    ranks = sorted([node.start(victim), survivor], key=lambda rank: rank.rank)
    job.bind(ranks)
    job.verify(ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("loading", [True, False], ids=["loading", "serving"])
@in_time
def test_signals(node, store, tmp_path, number, loading):
    """End a keeper cleanly, with nothing behind, whether it loads or serves."""
    names = node.look()
    where = Stop(tmp_path, "load.block", "keeper")
    keeper = Keeper(node, tmp_path, store, stop=where if loading else None)
    if loading:
        where.arrives(keeper.process)
    else:
        keeper.is_ready()
    keeper.process.signal(number)
    keeper.process.signal(signal.SIGCONT)
    began = time.monotonic()
    status = keeper.process.result()
    assert_soon(time.monotonic() - began, DEATH_SECONDS)
    assert status == (0 if not loading else 130 if number == signal.SIGINT else 1), keeper.text()
    assert "Traceback" not in keeper.text()
    keeper.process.end()
    node.settles(names)
