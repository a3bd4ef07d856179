# SPDX-License-Identifier: Apache-2.0
"""A keeper holds tables while servers come and go: who attaches, who may, what a death leaves."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from checkpoints import NOBODY
from engines import small_store
from table_machine import needs_namespaces, needs_root, points_library
from table_ranks import DEATH_SECONDS, Job, Node, Stop, group_name, hold, write_toml
from waiting import PATIENCE, assert_soon, in_time, wait_until

pytest_plugins = "table_fixtures"
pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("table_keeper")]
CYCLES = 200


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("keeper"))


@pytest.fixture(scope="module")
def shared_node():
    with Node(points_library()) as node:
        yield node


class Keeper:
    """`tables serve` in a process of its own."""

    def __init__(self, node, folder, store, *options, stop=None, name=None):
        self.name = name or group_name()
        self.output = folder / f"{self.name}-{time.monotonic_ns()}.txt"
        self.process = node.start("keeper", stop.environment if stop else None)
        self.process.do("warm_up")
        arguments = ["tables", "serve", str(store.path), "--name", self.name, "--json", *options]
        self.process.ask("command", arguments=arguments, output=str(self.output))

    def is_ready(self):
        """Waits until tables can be had; what it says of them."""
        wait_until(
            lambda: self.text().endswith("}\n"), lambda: f"{self.text()}; {self.process.where()}"
        )
        return json.loads(self.text())

    def text(self):
        return self.output.read_text() if self.output.exists() else ""


def attaching(folder, store, keeper, size=2, layers=(1,), **group):
    return Job(
        folder, store, size, layers=layers, group={"keeper": keeper.name, **group}, memory="keeper"
    )


def status(node, folder, processes):
    """What `tables status` says of some processes: other tests have theirs."""
    output = folder / f"status-{time.monotonic_ns()}.json"
    process = node.start()
    process.ask("command", arguments=["tables", "status", "--json"], output=str(output))
    assert process.result() == 0
    process.end()
    holders = json.loads(output.read_text())["holders"]
    return [one for one in holders if one["pid"] in [process.pid for process in processes]]


def stop(node, folder, keeper):
    output = folder / f"stop-{time.monotonic_ns()}.json"
    process = node.start()
    arguments = ["tables", "stop", keeper.name, "--timeout", str(PATIENCE)]
    process.ask("command", arguments=arguments, output=str(output))
    assert keeper.process.result() == 0, keeper.text()
    keeper.process.end()  # which the command waits for
    assert process.result() == 0, output.read_text()


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
    stop(node, tmp_path, keeper)
    assert not path.exists()


def test_attach_cycles_leak_nothing(node, store, tmp_path):
    """Neither here nor in the keeper."""
    keeper = Keeper(node, tmp_path, store)
    keeper.is_ready()
    process = node.ranks(1)[0]
    toml = attaching(tmp_path, store, keeper, size=1, layers=(1, 5)).toml(0)
    process.do("cycles", toml=toml, count=1)
    names, before, held = node.look(), process.do("snapshot"), keeper_descriptors(keeper)
    process.do("cycles", toml=toml, count=CYCLES)
    process.holds(before)
    node.settles(names)
    wait_until(
        lambda: keeper_descriptors(keeper) == held, lambda: (keeper_descriptors(keeper), held)
    )


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
