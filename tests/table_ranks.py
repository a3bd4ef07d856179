# SPDX-License-Identifier: Apache-2.0
"""Ranks of a node as real processes, for tests: started at will, told step by step what to do,
killed where a test wants it, with the node looked at before and after.

    with Node() as node:
        ranks = node.ranks(2)
        for rank in ranks:
            rank.ask("bind", toml=group_toml(folder, store, rank.rank, 2))
        answers = [rank.answer() for rank in ranks]

A node has network and /dev/shm of its own where the machine allows namespaces, so its sockets and
names are no other test's. Its processes are forks of one server (rank_server.py), which has
imported all of Python's side and has loaded no library."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkout import ROOT
from rank_server import LARGEST, open_files
from table_machine import library_environment, unshare_command, why_no_namespaces
from waiting import NEVER, PATIENCE, wait_until

from trtllm_engram.builder.made_up import config_of_size, write_made_up_store
from trtllm_engram.runtime import Store

DEATH_SECONDS = 10.0  # until every survivor has raised
_numbers = itertools.count()


class RankFailedError(AssertionError):
    """A rank raised where the test expected it to do its work."""


class Answer:
    """What became of one request: `result`, or `error` of class `kind`; and when."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.result = data.get("result")
        self.error: str = data.get("error", "")
        self.kind: str = data.get("kind", "")
        self.at: float = data["at"]

    def __repr__(self) -> str:
        return f"{self.kind}: {self.error}" if self.kind else f"result {self.result!r}"


class Process:
    """A process of a node: ask() sends a request to rank_server.Rank, answer() waits for it."""

    def __init__(self, node: Node, pid: int, channel: socket.socket, rank: int) -> None:
        self.node, self.pid, self.rank = node, pid, rank
        self._channel = channel
        self._handle = os.pidfd_open(pid)
        self._status: int | None = None

    def ask(self, do: str, **arguments: Any) -> None:
        self._channel.send(json.dumps({"do": do, **arguments}).encode())

    def answer(self) -> Answer:
        self._channel.settimeout(PATIENCE)
        try:
            data = self._channel.recv(LARGEST)
        except TimeoutError:
            raise AssertionError(
                f"rank {self.rank}: no answer within {PATIENCE} s; {self.where()}"
            ) from None
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError(f"rank {self.rank} ended: {self.wait()}")
        return Answer(json.loads(data))

    def do(self, do: str, **arguments: Any) -> Any:
        """The result of one request, which must not fail."""
        self.ask(do, **arguments)
        return self.result()

    def result(self) -> Any:
        answer = self.answer()
        if answer.kind:
            raise RankFailedError(f"rank {self.rank}: {answer}")
        return answer.result

    def refused(self) -> Answer:
        """The answer to a request that must fail, by one line of text."""
        answer = self.answer()
        assert answer.kind in ("EngramError", "InputError"), answer
        assert "\n" not in answer.error
        return answer

    def holds(self, before: dict[str, Any]) -> None:
        """Waits until its snapshot() is as before: a thread that has ended is seen for a moment."""
        wait_until(
            lambda: self.do("snapshot") == before,
            lambda: f"rank {self.rank}: before {before}, now {self.do('snapshot')}",
        )

    def connects(self, size: int) -> None:
        """Waits until it has the connections of a group of this size: rank 0 to each other rank,
        those to rank 0. From then on it sees these ranks die, by a pidfd of each."""
        expected = size - 1 if self.rank == 0 else 1
        wait_until(
            lambda: open_files(self.pid).count("anon_inode:[pidfd]") == expected,
            lambda: f"rank {self.rank}: expected {expected} connections; {self.where()}",
        )

    def signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> float:
        """Ends it by SIGKILL, waits for that, and says when the signal was sent."""
        sent = time.monotonic()
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL
        return sent

    def wait(self) -> int:
        """Its exit status, once it has ended; minus a signal's number where one ended it."""
        if self._status is None:
            if not select.select([self._handle], [], [], PATIENCE)[0]:
                raise AssertionError(f"process {self.pid}: expected its end; {self.where()}")
            self._status = self.node.request({"do": "reap", "pid": self.pid})
        return self._status

    def end(self) -> int:
        """Lets it end by itself: no more requests."""
        self._channel.shutdown(socket.SHUT_WR)
        return self.wait()

    def where(self) -> str:
        """What its threads wait for, for the text of a failure."""
        with contextlib.suppress(OSError):
            tasks = Path(f"/proc/{self.pid}/task").iterdir()
            places = [(task / "wchan").read_text() or "user" for task in tasks]
            state = re.search(r"State:\s*(.*)", Path(f"/proc/{self.pid}/status").read_text())
            return f"process {self.pid} is {state and state[1]}, threads in {', '.join(places)}"
        return f"process {self.pid} is gone"

    def close(self) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.wait()
        self._channel.close()
        os.close(self._handle)


class Node:
    """A machine of one's own, as far as sockets' names and /dev/shm go.

    Args:
        library: the library that its processes load; None: the installed one.
        shm: size of its /dev/shm, as mount knows it.
    """

    def __init__(self, library: Path | None = None, shm: str = "1g") -> None:
        self.isolated = not why_no_namespaces()
        self._processes: list[Process] = []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ)
        environment.pop("TRTLLM_ENGRAM_TABLES", None)
        environment["OPENBLAS_NUM_THREADS"] = "1"
        if library is not None:
            environment.update(library_environment(library))
        prepare = f"mount -t tmpfs -o size={shm},mode=1777 tmpfs /dev/shm"
        enter = (
            [*unshare_command(), "sh", "-ec", f'{prepare}; exec "$@"', "sh"]
            if self.isolated
            else []
        )
        command = [sys.executable, str(ROOT / "tests/rank_server.py"), str(theirs.fileno())]
        with theirs:
            self._server = subprocess.Popen(
                [*enter, *command],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                cwd=ROOT / "tests",
            )
        self._control = ours

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.end_processes()
        self._control.close()
        assert self._server.wait(PATIENCE) == 0

    def end_processes(self) -> None:
        while self._processes:
            self._processes.pop().close()

    def request(self, message: dict[str, Any], handles: Sequence[int] = ()) -> Any:
        socket.send_fds(self._control, [json.dumps(message).encode()], handles)
        self._control.settimeout(PATIENCE)
        return json.loads(self._control.recv(LARGEST))

    def start(
        self, rank: int = 0, environment: dict[str, str] | None = None, user: int = 0
    ) -> Process:
        """A new process, of another user where `user` is one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            message = {"do": "start", "environment": environment or {}, "user": user}
            pid = self.request(message, [theirs.fileno()])
        self._processes.append(Process(self, pid, ours, rank))
        return self._processes[-1]

    def ranks(
        self, count: int, environments: Mapping[int, dict[str, str]] | None = None
    ) -> list[Process]:
        """Processes that have loaded the library, by rank; environments: of some, by rank."""
        ranks = [self.start(rank, (environments or {}).get(rank)) for rank in range(count)]
        for rank in ranks:
            rank.ask("warm_up")
        for rank in ranks:
            rank.result()
        return ranks

    def look(self) -> dict[str, Any]:
        """The names in /dev/shm and the Unix sockets that are there now."""
        found = self.request({"do": "look"})
        if not self.isolated:  # others' are there too
            for kind in ("shm", "unix"):
                found[kind] = [name for name in found[kind] if "engram" in name]
        return found

    def settles(self, before: dict[str, Any]) -> None:
        """Waits until names and sockets are as before."""
        wait_until(lambda: self.look() == before, lambda: f"before {before}, now {self.look()}")


class Stop:
    """A point of the code at which one process of a test stops.

    rank: whose arrival counts: a rank, "keeper", or None for whoever has this environment.
    """

    def __init__(self, folder: Path, name: str, rank: int | str | None = None) -> None:
        self.name = name
        self._file = folder / f"stop-{next(_numbers)}"
        place = name if rank is None else f"{name}@{rank}"
        self.environment = {
            "TRTLLM_ENGRAM_STOP_AT": place,
            "TRTLLM_ENGRAM_STOP_FILE": str(self._file),
        }

    def arrives(self, process: Process) -> None:
        """Waits until the process has stopped there; a point that is never reached fails."""
        wait_until(
            lambda: self.holds(process.pid),
            lambda: f"{self.name}: expected rank {process.rank} to come by; {process.where()}",
        )

    def holds(self, pid: int) -> bool:
        """Whether a process has stopped there."""
        state = re.search(r"State:\s*(\w)", Path(f"/proc/{pid}/status").read_text())
        if not self._file.exists() or not state or state[1] != "T":
            return False
        assert self._file.read_text() == self.name
        return True


def made_up_store(folder: Path, num_bytes: int) -> Path:
    """A store in name alone, whose table of layer 1, for formula_seed, has about as many bytes."""
    folder.mkdir(exist_ok=True)
    write_made_up_store(folder, config_of_size(num_bytes, layers=(1,)))
    return folder


def group_name() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


def hold(ranks: Sequence[Process], before: Sequence[dict[str, Any]]) -> None:
    """Each rank holds what it held before."""
    for rank, snapshot in zip(ranks, before, strict=True):
        rank.holds(snapshot)


def write_toml(
    path: Path,
    tables: dict[str, dict[str, Any]],
    group: dict[str, Any] | None = None,
) -> str:
    """A file of tables, for Rank.bind."""
    lines = ["format_version = 1"]
    sections = {f"tables.{name}": keys for name, keys in tables.items()}
    for name, keys in ({"group": group, **sections} if group else sections).items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return str(path)


class Job:
    """One bind by all ranks of a group: the files that say so.

    group: keys of [group] for every rank; table: keys of each table.
    """

    def __init__(
        self,
        folder: Path,
        store: Store | Path,
        size: int,
        *,
        layers: Sequence[int] = (1,),
        group: dict[str, Any] | None = None,
        **table: Any,
    ) -> None:
        self.folder, self.size = folder, size
        self.group = {"name": group_name(), "size": size, "timeout_s": NEVER, **(group or {})}
        path = str(store.path if isinstance(store, Store) else store)
        self.tables = {
            f"table_{layer}": {"store": path, "layer": layer, **table} for layer in layers
        }

    def toml(self, rank: int, **changes: Any) -> str:
        """The file for a rank; changes: of [group]."""
        path = self.folder / f"{self.group['name']}-{rank}-{next(_numbers)}.toml"
        return write_toml(path, self.tables, {**self.group, "rank": rank, **changes})

    def bind(self, ranks: Sequence[Process]) -> list[dict[str, Any]]:
        """Every rank's tables."""
        self.ask(ranks)
        return [rank.result() for rank in ranks]

    def ask(self, ranks: Sequence[Process]) -> None:
        for rank in ranks:
            rank.ask("bind", toml=self.toml(rank.rank))

    def verify(self, ranks: Sequence[Process]) -> None:
        """Every byte that every rank sees is the formula's."""
        for name in self.tables:
            for rank in ranks:
                rank.ask("verify", name=name)
            for rank in ranks:
                assert rank.result() > 0
