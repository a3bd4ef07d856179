# SPDX-License-Identifier: Apache-2.0
"""The processes of table_ranks.py: a server that has imported everything and loaded no library, and
its forks, each of which is a rank (or a keeper, or a stranger) that does what the test asks."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from waiting import PATIENCE

import trtllm_engram.runtime.cli
from trtllm_engram.builder.checkpoint import SCALES, VALUES
from trtllm_engram.builder.formula import Formula
from trtllm_engram.builder.manifest import read_manifest
from trtllm_engram.runtime import Group, Tables, _native
from trtllm_engram.runtime.tables import describe_tables

LARGEST = 1 << 20  # of a request or an answer
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


def open_files(process: int | str) -> list[str]:
    """What the descriptors of a process are open on, by /proc."""
    files = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, as the listing's own is
            files.append(str(link.readlink()))
    return files


class Mallinfo2(ctypes.Structure):
    """Of <malloc.h>."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


class Rank:
    """What a forked process can be asked; every answer is JSON."""

    def __init__(self) -> None:
        self.tables: list[Tables] = []
        self.sockets: list[socket.socket] = []
        logger = logging.getLogger("trtllm_engram")
        logger.addHandler(logging.NullHandler())  # what the library logs comes this far
        logger.setLevel(logging.DEBUG)

    def warm_up(self) -> None:
        """Loads the library, so that what it opens once is no change of snapshot()."""
        describe_tables()

    def bind(self, toml: str) -> dict[str, Any]:
        self.tables.append(Tables.from_toml(toml))
        return self.tables[-1].describe()

    def bind_here(self, group: dict[str, Any], **table: Any) -> None:
        """By arguments, in place of a file."""
        self.tables.append(Tables(Group(**group)))
        self.tables[-1].bind("table_1", **table)

    def describe(self) -> dict[str, Any]:
        return describe_tables()

    def close(self) -> None:
        while self.tables:
            self.tables.pop().close()

    def cycles(self, toml: str, count: int) -> None:
        """So many binds and closes."""
        for _ in range(count):
            self.bind(toml)
            self.close()

    def heap_bytes(self) -> int:
        """What C and C++ have of the heap: malloc's chunks in use and its mappings."""
        gc.collect()
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = Mallinfo2
        found = mallinfo2()
        return int(found.uordblks + found.hblkhd)

    def verify(self, name: str, seed: int = 0) -> int:
        """How many bytes of a table were compared with the formula; all were right."""
        about = describe_tables()[name]
        config = read_manifest(Path(about["store"])).config
        view = _native.table_host_view(name)
        checked = 0
        for tensor, address, row in (
            (VALUES, view.values, config.head_dim),
            (SCALES, view.scales, config.head_dim // 32),
        ):
            size = about["num_rows"] * row
            there = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            for place, chunk in Formula(config, about["layer"], tensor, seed).chunks(0, size):
                expected = np.frombuffer(chunk, np.uint8)
                found = there[place : place + len(expected)]
                if not np.array_equal(found, expected):
                    wrong = place + int(np.flatnonzero(found != expected)[0])
                    raise ValueError(f"{name}: {tensor}: byte {wrong} of {size} is wrong")
                checked += len(expected)
        return checked

    def view(self, name: str, device: int = 0) -> None:
        """As a lookup on a GPU does, which loads what a process alone has not loaded."""
        _native.table_view(name, device)

    def touch(self, name: str) -> int:
        """Reads every page of a table's values."""
        about = describe_tables()[name]
        view = _native.table_host_view(name)
        size = about["num_rows"] * about["head_dim"]
        there = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(view.values))
        return int(there[::4096].sum())

    def snapshot(self) -> dict[str, Any]:
        """What this process holds."""
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        shared = [line.split(maxsplit=5)[5] for line in maps if line.split()[1].endswith("s")]
        return {
            "fds": sorted(open_files("self")),
            "shared": sorted(shared),
            "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        }

    def rollup(self) -> dict[str, int]:
        """Bytes of this process's memory by kind: Rss, Pss, Shared_Dirty and so on."""
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
        return {line.split()[0].rstrip(":"): 1024 * int(line.split()[1]) for line in lines}

    def note_interrupts(self, path: str) -> None:
        """From here on SIGINT makes a file once Python handles it."""

        def handle(*_: object) -> None:
            Path(path).touch()
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, handle)

    def fork(self, name: str) -> int:
        """Ends a child, libraries' exit handlers included, that has read a table; its status."""
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                self.verify(name)
                self.close()
                code = 0
            ctypes.CDLL(None).exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def fork_soon(self, while_there: str) -> None:
        """Another thread forks children for a while; they live as long as a file is there."""

        def work() -> None:
            for _ in range(20):
                time.sleep(0.01)
                if os.fork() == 0:
                    while Path(while_there).exists():
                        time.sleep(0.05)
                    os._exit(0)

        threading.Thread(target=work, daemon=True).start()

    def command(self, arguments: list[str], output: str) -> int:
        """Runs `trtllm-engram ...` to its end, with its streams in a file."""
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.close(handle)
        try:
            return int(trtllm_engram.runtime.cli.main(arguments) or 0)
        except SystemExit as error:
            return int(error.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def listen(self, address: str, kind: str = "SOCK_SEQPACKET") -> None:
        """Takes an address ("@..." is abstract) and never answers who connects."""
        taken = socket.socket(socket.AF_UNIX, getattr(socket, kind))
        taken.bind(address.replace("@", "\0", 1))
        taken.listen()
        self.sockets.append(taken)

    def disturb(self, address: str, data: str = "", patience: float = 1) -> str:
        """Connects as soon as somebody listens, sends bytes and stays; how that ended, or "silence"
        where nothing came of it for the seconds of its patience."""
        deadline = time.monotonic() + PATIENCE
        while True:
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                stranger.connect(address.replace("@", "\0", 1))
                if data:
                    stranger.send(data.encode())
                stranger.settimeout(patience)
                self.sockets.append(stranger)
                answer = stranger.recv(LARGEST)
            except TimeoutError:
                return "silence"
            except (ConnectionResetError, BrokenPipeError):
                return "closed"
            except OSError as error:
                if time.monotonic() > deadline:
                    return str(error)
                time.sleep(0.005)
                continue
            return "closed" if not answer else "answer"

    def peek(self, path: str) -> None:
        """Reads a file of any kind, or lists a folder; raises what the kernel says."""
        if Path(path).is_dir():
            next(Path(path).iterdir())
        else:
            os.close(os.open(path, os.O_RDONLY))

    def shell(self, command: str) -> str:
        """Runs a command in the node; what it prints."""
        run = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
        return run.stdout

    def inherited(self) -> list[str]:
        """What a program that this process starts finds open."""
        listing = (
            "import os; print([os.readlink(f'/proc/self/fd/{i}') for i in range(3, 200)"
            " if os.path.exists(f'/proc/self/fd/{i}')])"
        )
        command = [sys.executable, "-c", listing]
        run = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=True)
        return list(ast.literal_eval(run.stdout))

    def spoil(self, name: str) -> None:
        """Writes into a table."""
        view = _native.table_host_view(name)
        ctypes.c_uint8.from_address(view.values).value ^= 1

    def limit(self, name: str, most: int = -1, more: int = 0) -> None:
        """Lowers one of RLIMIT_..., for descriptors to as many as there are and `more`."""
        if name == "RLIMIT_NOFILE":
            most = max(int(link.name) for link in Path("/proc/self/fd").iterdir()) + 1 + more
        resource.setrlimit(getattr(resource, name), (most, most))

    def enter_cgroup(self, procs: str) -> None:
        Path(procs).write_text(str(os.getpid()), encoding="utf-8")

    def fill(self, path: str, num_bytes: int) -> None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(handle, 0, num_bytes)
        os.close(handle)


def serve_rank(channel: socket.socket, start: dict[str, Any]) -> None:
    os.environ.update(start["environment"])
    if start["user"]:
        os.setgroups([])
        os.setresgid(*[start["user"]] * 3)
        os.setresuid(*[start["user"]] * 3)
        # As if the program had been started by that user: its /proc/self is its own.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    rank = Rank()
    while request := channel.recv(LARGEST):
        arguments = json.loads(request)
        action: Callable[..., Any] = getattr(rank, arguments.pop("do"))
        answer: dict[str, Any]
        try:
            answer = {"result": action(**arguments)}
        except BaseException as error:
            answer = {"error": str(error), "kind": type(error).__name__}
        answer["at"] = time.monotonic()
        channel.send(json.dumps(answer).encode())
    rank.close()


def _start(channel: socket.socket, start: dict[str, Any], control: socket.socket) -> int:
    pid = os.fork()
    if pid != 0:
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A shell that starts the tests in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    control.close()
    code = 0
    try:
        serve_rank(channel, start)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    channel.close()
    # With what a process's end runs in C++, and none of what the server's Python registered.
    ctypes.CDLL(None).exit(code)
    return 0


def _look() -> dict[str, Any]:
    """What the node shows: names in /dev/shm and Unix sockets."""
    sockets = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]
    return {
        "shm": sorted(path.name for path in Path("/dev/shm").iterdir()),
        "unix": sorted(" ".join(line.split()[7:]) for line in sockets),
    }


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    while True:
        message, handles, _, _ = socket.recv_fds(control, LARGEST, 1)
        if not message:
            return  # and PDEATHSIG ends who is left
        request = json.loads(message)
        answer: Any
        if request["do"] == "start":
            with socket.socket(fileno=handles[0]) as channel:
                answer = _start(channel, request, control)
        elif request["do"] == "reap":
            answer = os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])
        else:
            answer = _look()
        control.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
