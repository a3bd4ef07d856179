# SPDX-License-Identifier: Apache-2.0
"""A real tritonserver for tests: that of `make triton`, on free ports, with a Python of its own."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE

import trtllm_engram.runtime
from trtllm_engram.runtime.tensorrt_files import find_tensorrt

ROOT = Path(__file__).resolve().parents[1]
TRITON = ROOT / ".triton"
_SERVER = TRITON / "server/pytriton/tritonserver"
BACKENDS = _SERVER / "backends"
_START_S = 2 * PATIENCE
_ANSWER_S = 240.0  # loading a model starts processes: a busy machine takes its time
HOST = "127.0.0.1"
# Of a module's tests. One server at a time: each has a dozen threads.
MARKS = [pytest.mark.triton, pytest.mark.multiproc, pytest.mark.xdist_group("triton")]
_PORT_TAKEN = "already in use"  # in the log of a server that ends for it


needs_tensorrt_backend = pytest.mark.skipif(
    not (BACKENDS / "tensorrt/libtriton_tensorrt.so").exists(),
    reason="this machine: no TensorRT backend in .triton/server (docs/serving.md)",
)


def is_there() -> bool:
    return (TRITON / "server").is_dir() and (TRITON / "python").is_dir()


def client(protocol: str) -> Any:
    """tritonclient.http or tritonclient.grpc."""
    if str(TRITON / "python") not in sys.path:
        sys.path.append(str(TRITON / "python"))  # last: the rest there is for the server
    return importlib.import_module(f"tritonclient.{protocol}")


def tensorrt_environment(tables: Path) -> dict[str, str]:
    """Of a server with the tensorrt form: its tables, and TensorRT's libraries."""
    folders = [str(one.library.parent) for one in find_tensorrt()[:1]]
    return {"TRTLLM_ENGRAM_TABLES": str(tables), "LD_LIBRARY_PATH": ":".join(folders)}


def make_python(folder: Path, *, site_packages: Path = TRITON / "python") -> Path:
    """A folder for PATH whose python3 has these packages and this very trtllm_engram."""
    venv.create(folder, with_pip=False, symlinks=True)
    package = Path(next(iter(trtllm_engram.runtime.__path__))).parents[1]
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "test.pth").write_text(f"{site_packages}\n{package}\n")
    return folder / "bin"


class Server:
    """A running tritonserver."""

    def __init__(self, process: subprocess.Popen[bytes], ports: Sequence[int], log: Path) -> None:
        self.process = process
        self.urls = {"http": f"{HOST}:{ports[0]}", "grpc": f"{HOST}:{ports[1]}"}
        self.metrics_url = f"http://{HOST}:{ports[2]}/metrics"
        self._log = log
        self._connections: list[Any] = []

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def connect(self, protocol: str) -> Any:
        """A client, closed with the server, which would wait for its end."""
        options = {"network_timeout": _ANSWER_S} if protocol == "http" else {}
        connection = client(protocol).InferenceServerClient(self.urls[protocol], **options)
        self._connections.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        self.process.kill()
        self.process.wait()

    def metrics(self) -> str:
        with urllib.request.urlopen(self.metrics_url, timeout=_ANSWER_S) as answer:
            return str(answer.read().decode())

    def stubs(self) -> list[int]:
        """Processes of Python models."""
        pids = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                pid, name, rest = re.match(r"(\d+) \((.*)\) (.*)", status.read_text()).groups()
                if name.startswith("triton_python_b") and int(rest.split()[1]) == self.process.pid:
                    pids.append(int(pid))
        return sorted(pids)

    def pss(self) -> int:
        """Bytes of the server and its stubs, each page shared out among those who map it."""
        return sum(map(_pss, [self.process.pid, *self.stubs()]))


def _pss(pid: int) -> int:
    """0 of a process that has ended, as stubs of a model just unloaded do."""
    with contextlib.suppress(OSError):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        if found := re.search(r"^Pss: +(\d+) kB", rollup, re.MULTILINE):
            return int(found[1]) * 1024
    return 0


@contextlib.contextmanager
def serve(
    repository: Path,
    python: Path,
    log: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Starts a server and waits until it answers; models that cannot be loaded do not end it.
    environment: more variables; its LD_LIBRARY_PATH comes after the server's own."""
    folders = [str(_SERVER.parents[1] / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    more = {"MALLOC_ARENA_MAX": "4", "MALLOC_MMAP_THRESHOLD_": "262144", **(environment or {})}
    folders += filter(None, [more.get("LD_LIBRARY_PATH")])
    variables = os.environ | more
    variables |= {"PATH": f"{python}:{os.environ['PATH']}", "LD_LIBRARY_PATH": ":".join(folders)}
    command = [
        *(str(_SERVER / "bin/tritonserver"), f"--model-repository={repository}"),
        *(f"--backend-directory={BACKENDS}", "--exit-on-error=false"),
        *("--strict-readiness=false", *options),
    ]
    server = _start(command, variables, log)
    try:
        yield server
    finally:
        server.close()


def _start(command: Sequence[str], variables: Mapping[str, str], log: Path) -> Server:
    """On ports that are free; another program may take one before the server does."""
    names = ("http", "grpc", "metrics")
    while True:
        ports = free_ports(len(names))
        where = [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]
        where += [f"--{name}-address={HOST}" for name in names]
        with log.open("wb") as output:
            words = [*command, *where]
            process = subprocess.Popen(words, stdout=output, stderr=output, env=variables)
        server = Server(process, ports, log)
        try:
            _wait(server)
        except BaseException:
            server.close()
            if _PORT_TAKEN in server.log():
                continue
            raise
        return server


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def _wait(server: Server) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"tritonserver ended: {server.log()[-2000:]}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(
                f"http://{server.urls['http']}/v2/health/live", timeout=5
            ).close()
            return
        time.sleep(0.05)
    raise RuntimeError(f"tritonserver: no answer in {_START_S} s: {server.log()[-2000:]}")
