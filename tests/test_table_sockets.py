# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a node meet: names and paths that others have taken, and who knocks."""

import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

import pytest
from checkpoints import NOBODY
from engines import small_store
from table_machine import needs_namespaces, needs_root
from table_ranks import Job, Node
from waiting import PATIENCE, wait_until

pytest_plugins = "table_fixtures"
pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("table_sockets")]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("sockets"))


@pytest.fixture(scope="module")
def shared_node():
    with Node() as node:
        yield node


@pytest.fixture
def open_folder():
    """One that other users can see into, as tmp_path is not; nobody else can write there."""
    folder = Path(tempfile.mkdtemp(prefix="engram-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def abstract(name, number=0):
    return f"@trtllm-engram/0/group/{name}/{number}"


@needs_root
@pytest.mark.parametrize("taken", [1, 7])
def test_names_taken_by_another_user(node, store, tmp_path, taken):
    """Another user's sockets under the group's names capture nobody."""
    job = Job(tmp_path, store, 2)
    stranger = node.start(user=NOBODY)
    for number in range(taken):
        stranger.do("listen", address=abstract(job.group["name"], number))
    ranks = node.ranks(2)
    job.bind(ranks)
    job.verify(ranks)


@needs_root
def test_all_names_taken_by_another_user(node, store, tmp_path):
    """No name is left: an error of all ranks that says by whom, within the timeout."""
    job = Job(tmp_path, store, 2, group={"timeout_s": 2.0})
    stranger = node.start(user=NOBODY)
    for number in range(8):
        stranger.do("listen", address=abstract(job.group["name"], number))
    ranks = node.ranks(2)
    job.ask(ranks)
    texts = [rank.refused().error for rank in ranks]
    assert all(str(NOBODY) in text for text in texts), texts


@needs_root
def test_another_user_knocks(node, store, tmp_path):
    """Connections of another user are closed, and take nobody's place."""
    job = Job(tmp_path, store, 3)
    strangers = [node.start(user=NOBODY) for _ in range(3)]
    ranks = node.ranks(3)
    job.ask(ranks[:1])
    for stranger in strangers:
        stranger.ask(
            "disturb", address=abstract(job.group["name"]), data='{"rank": 1}', patience=PATIENCE
        )
    assert [stranger.result() for stranger in strangers] == ["closed"] * 3
    job.ask(ranks[1:])
    for rank in ranks:
        rank.result()
    job.verify(ranks)


@pytest.mark.parametrize("data", ["", "no JSON", '{"hello": 1}', "x" * 60000])
def test_strangers_of_the_same_user(node, store, tmp_path, data):
    """Who connects and says nothing, or nonsense, neither stops the ranks nor takes a place."""
    job = Job(tmp_path, store, 2)
    strangers = [node.start() for _ in range(3)]
    ranks = node.ranks(2)
    job.ask(ranks[:1])
    for stranger in strangers:
        stranger.ask("disturb", address=abstract(job.group["name"]), data=data)
    time.sleep(0.3)
    job.ask(ranks[1:])
    for rank in ranks:
        rank.result()
    job.verify(ranks)


def test_path_socket(node, store, tmp_path):
    """Seen by this user alone while ranks meet, and gone afterwards."""
    path = tmp_path / "socket"
    job = Job(tmp_path, store, 2, group={"socket": str(path)})
    ranks = node.ranks(2)
    job.ask(ranks[:1])
    wait_until(path.exists)
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    job.ask(ranks[1:])
    for rank in ranks:
        rank.result()
    job.verify(ranks)
    assert not path.exists()


def test_stale_path_socket(node, store, tmp_path):
    """What a rank that was killed left behind is replaced."""
    path = tmp_path / "socket"
    job = Job(tmp_path, store, 2, group={"socket": str(path)})
    dead = node.start()
    dead.do("listen", address=str(path))
    dead.kill()
    assert path.exists()
    ranks = node.ranks(2)
    job.bind(ranks)
    job.verify(ranks)
    assert not path.exists()


@needs_root
@pytest.mark.parametrize("alive", [True, False], ids=["alive", "stale"])
def test_path_socket_of_another_user(node, store, tmp_path, open_folder, alive):
    """In the way: refused by name on all ranks, never taken for a rank, never removed."""
    open_folder.chmod(0o777)
    path = open_folder / "socket"
    stranger = node.start(user=NOBODY)
    stranger.do("listen", address=str(path))
    open_folder.chmod(0o755)
    if not alive:
        stranger.kill()
    job = Job(tmp_path, store, 2, group={"socket": str(path), "timeout_s": 3.0})
    ranks = node.ranks(2)
    job.ask(ranks)
    for rank in ranks:
        assert str(path) in rank.refused().error
    assert path.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link", "nowhere"])
def test_path_that_is_no_socket(node, store, tmp_path, kind):
    """Nobody's file is removed for a socket."""
    path = tmp_path / "socket"
    {
        "file": lambda: path.write_text("mine"),
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
        "nowhere": lambda: None,
    }[kind]()
    if kind == "nowhere":
        path = tmp_path / "no folder" / "socket"
    job = Job(tmp_path, store, 2, group={"socket": str(path), "timeout_s": 2.0})
    ranks = node.ranks(2)
    job.ask(ranks)
    named = path.parent if kind == "nowhere" else path
    assert all(str(named) in rank.refused().error for rank in ranks)
    assert kind == "nowhere" or os.path.lexists(path)


@pytest.mark.parametrize(
    ("mode", "advice"), [(0o777, "chmod go-w"), (0o1777, "a folder of this user's own in it")]
)
def test_folder_that_others_can_write(node, store, tmp_path, open_folder, mode, advice):
    """Who may close it to others is told to; not of one that is everybody's, as /tmp is."""
    open_folder.chmod(mode)
    path = open_folder / "socket"
    job = Job(tmp_path, store, 2, group={"socket": str(path), "timeout_s": 2.0})
    ranks = node.ranks(2)
    job.ask(ranks)
    for rank in ranks:
        error = rank.refused().error
        assert str(open_folder) in error
        assert advice in error


@needs_namespaces
@pytest.mark.parametrize("guest", [0, 1])
def test_container(node, store, tmp_path, guest):
    """A rank with a network and a /dev/shm of its own, of 64 MiB, meets the others at a path."""
    job = Job(tmp_path, store, 2, group={"socket": str(tmp_path / "socket")}, memory="memfd")
    with Node(shm="64m") as container:
        ranks = [(container if rank == guest else node).start(rank) for rank in range(2)]
        job.bind(ranks)
        job.verify(ranks)


@needs_root
@pytest.mark.parametrize("kind", ["memfd", "shm"])
def test_nothing_for_other_users(node, store, tmp_path, kind):
    """Another user reaches neither the memory nor the descriptors of a rank."""
    ranks = node.ranks(2)
    Job(tmp_path, store, 2, memory=kind).bind(ranks)
    stranger = node.start(user=NOBODY)
    for rank in ranks:
        for place in ("fd", "map_files", "maps", "mem", "smaps"):
            stranger.ask("peek", path=f"/proc/{rank.pid}/{place}")
            assert stranger.answer().kind == "PermissionError", place
