# SPDX-License-Identifier: Apache-2.0
"""A keeper holds tables while servers come and go: who attaches, who may, what is told."""

import re
import signal

import pytest
from checkpoints import NOBODY
from engines import small_store
from keepers import Keeper, attaching, status, stop
from process_memory import writable_tables
from table_machine import needs_namespaces, needs_root, points_library
from table_ranks import Job, Node, group_name, hold
from waiting import PATIENCE

pytest_plugins = "table_fixtures"
pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("table_keeper")]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("keeper"))


@pytest.mark.parametrize("kind", ["memfd", "shm"])
def test_attach_after_restarts(node, store, tmp_path, kind):
    """Servers come and go; each finds every byte, and none reads the store."""
    keeper = Keeper(node, tmp_path, store, "--memory", kind)
    about = keeper.is_ready()["keeper"]
    assert about["pid"] == keeper.process.pid
    assert {table["kind"] for table in about["tables"]} == {kind}
    job = attaching(tmp_path, store, keeper, layers=(1, 5))
    for _ in range(2):
        ranks = node.ranks(2)
        for tables in job.bind(ranks):
            assert all(table["keeper"] == keeper.name for table in tables.values())
        job.verify(ranks)
        for rank in ranks:
            assert rank.end() == 0
    stop(node, tmp_path, keeper)


def test_attach_needs_no_table_file(node, tmp_path):
    """Once a keeper has it, the checkpoint may even be gone."""
    store = small_store(tmp_path)
    keeper = Keeper(node, tmp_path, store)
    keeper.is_ready()
    ranks = node.ranks(2)
    job = attaching(tmp_path, store, keeper)
    for file in (tmp_path / "checkpoint").glob("*.safetensors"):
        file.unlink()
    job.bind(ranks)
    job.verify(ranks)


def test_status(node, store, tmp_path):
    """Who holds what: true whatever ends, and whatever way it does."""
    keeper = Keeper(node, tmp_path, store)
    ranks = node.ranks(2)
    ours = [keeper.process, *ranks]
    keeper.is_ready()
    assert [holder["pid"] for holder in status(node, tmp_path, ours)] == [keeper.process.pid]
    job = attaching(tmp_path, store, keeper, layers=(1, 5))
    job.bind(ranks)
    holders = {holder["pid"]: holder for holder in status(node, tmp_path, ours)}
    assert sorted(holders) == sorted(process.pid for process in ours)
    assert holders[keeper.process.pid]["role"] == "keeper"
    for rank in ranks:
        holder = holders[rank.pid]
        assert (holder["role"], holder["rank"], holder["size"]) == ("rank", rank.rank, 2)
        assert sorted(table["name"] for table in holder["tables"]) == ["table_1", "table_5"]
        for table in holder["tables"]:
            assert table["content_id"] == store.manifest.content_id
            assert table["num_bytes"] > 0
            assert 0 <= table["huge_bytes"] <= table["num_bytes"]
    ranks[0].kill()
    keeper.process.kill()
    assert [holder["pid"] for holder in status(node, tmp_path, ours)] == [ranks[1].pid]
    job.verify(ranks[1:])
    ranks[1].do("close")
    assert status(node, tmp_path, ours) == []


def test_no_keeper(node, store, tmp_path):
    """One line of all ranks, that says which was looked for."""
    ranks = node.ranks(2)
    before = [rank.do("snapshot") for rank in ranks]
    name = group_name()
    job = Job(tmp_path, store, 2, group={"keeper": name}, memory="keeper")
    job.ask(ranks)
    for rank in ranks:
        assert name in rank.refused().error
    hold(ranks, before)


def test_keeper_of_another_store(node, store, tmp_path):
    """Nobody attaches to tables of other bytes."""
    other = small_store(tmp_path, seed=1)
    keeper = Keeper(node, tmp_path, other)
    keeper.is_ready()
    ranks = node.ranks(2)
    job = attaching(tmp_path, store, keeper)
    job.ask(ranks)
    for rank in ranks:
        assert store.manifest.content_id[:8] in rank.refused().error


def test_keeper_by_what_it_holds(node, store, tmp_path):
    """Where no name is given, the one of the table's content serves."""
    others = [
        Keeper(node, tmp_path, small_store(tmp_path / str(seed), seed=seed)) for seed in (1, 2)
    ]
    keeper = Keeper(node, tmp_path, store)
    for one in (*others, keeper):
        one.is_ready()
    ranks = node.ranks(2)
    job = Job(tmp_path, store, 2, memory="keeper")
    for tables in job.bind(ranks):
        assert tables["table_1"]["keeper"] == keeper.name
    job.verify(ranks)


@needs_namespaces
def test_keeper_that_cannot_be_reached(node, store, tmp_path):
    """One in another network namespace, whose record is seen, is passed over."""
    keeper = Keeper(node, tmp_path, store, name="1" + group_name())
    keeper.is_ready()
    with Node(points_library()) as container:
        others = Keeper(container, tmp_path, store, name="0" + group_name())
        others.is_ready()
        ranks = node.ranks(2)
        job = Job(tmp_path, store, 2, memory="keeper")
        for tables in job.bind(ranks):
            assert tables["table_1"]["keeper"] == keeper.name
        job.verify(ranks)


def test_two_keepers_of_a_name(node, store, tmp_path):
    """The second is refused, and names the first; that one serves on."""
    keeper = Keeper(node, tmp_path, store)
    keeper.is_ready()
    second = Keeper(node, tmp_path, store, name=keeper.name)
    assert second.process.result() in (1, 2)
    assert str(keeper.process.pid) in second.text()
    ranks = node.ranks(1)
    job = attaching(tmp_path, store, keeper, size=1)
    job.bind(ranks)
    job.verify(ranks)


@needs_root
def test_keeper_of_another_user(node, store, tmp_path):
    """Under the same name: it serves its own user's, and nobody else attaches to it."""
    name = group_name()
    stranger = node.start(user=NOBODY)
    for number in range(2):
        stranger.do("listen", address=f"@trtllm-engram/0/keeper/{name}/{number}")
    ranks = node.ranks(2)
    job = Job(tmp_path, store, 2, group={"keeper": name}, memory="keeper")
    job.ask(ranks)
    for rank in ranks:
        rank.refused()
    keeper = Keeper(node, tmp_path, store, name=name)
    keeper.is_ready()
    job.bind(ranks)
    job.verify(ranks)


@needs_root
def test_another_user_knocks(node, store, tmp_path):
    """And gets nothing, not even an answer; the keeper serves on."""
    keeper = Keeper(node, tmp_path, store)
    keeper.is_ready()
    addresses = [
        re.sub(r"^.*(@trtllm-engram)", r"\1", line)
        for line in node.look()["unix"]
        if keeper.name in line
    ]
    assert len(addresses) == 1
    stranger = node.start(user=NOBODY)
    for data in ("", "{}"):
        ended = stranger.do("disturb", address=addresses[0], data=data, patience=PATIENCE)
        assert ended == "closed"
    ranks = node.ranks(2)
    job = attaching(tmp_path, store, keeper)
    job.bind(ranks)
    job.verify(ranks)


@pytest.mark.parametrize("data", ["", "no JSON", "{}", "x" * 60000])
def test_strangers_of_the_same_user(node, store, tmp_path, data):
    """Who says nothing, or nonsense, keeps nobody from attaching."""
    keeper = Keeper(node, tmp_path, store)
    keeper.is_ready()
    address = next(line for line in node.look()["unix"] if keeper.name in line)
    stranger = node.start()
    stranger.do("disturb", address=address[address.index("@") :], data=data)
    ranks = node.ranks(2)
    job = attaching(tmp_path, store, keeper)
    job.bind(ranks)
    job.verify(ranks)


def test_clients_cannot_write(node, store, tmp_path):
    """What a keeper hands out is mapped for reading, so that no server spoils the next one's."""
    keeper = Keeper(node, tmp_path, store)
    keeper.is_ready()
    ranks = node.ranks(1)
    attaching(tmp_path, store, keeper, size=1).bind(ranks)
    assert [writable_tables(one.pid) for one in (keeper.process, *ranks)] == [[], []]
    ranks[0].ask("spoil", name="table_1")
    with pytest.raises(EOFError):
        ranks[0].answer()
    assert ranks[0].wait() in (-signal.SIGSEGV, 1)  # 1: a sanitizer says so


@needs_namespaces
def test_container(node, store, tmp_path):
    """A server with a network and a /dev/shm of its own attaches by a path."""
    path = tmp_path / "keeper"
    keeper = Keeper(node, tmp_path, store, "--socket", str(path))
    keeper.is_ready()
    assert path.stat().st_mode & 0o077 == 0
    with Node(points_library(), shm="64m") as container:
        ranks = container.ranks(2)
        job = Job(tmp_path, store, 2, group={"keeper": str(path)}, memory="keeper")
        job.bind(ranks)
        job.verify(ranks)
    attaching(tmp_path, store, keeper, size=1).bind(node.ranks(1))  # by name, where it is seen
    stop(node, tmp_path, keeper)
    assert not path.exists()
