# SPDX-License-Identifier: Apache-2.0
"""What tests of shared tables need of the machine: namespaces, cgroups, the library that stops at
points, and ways to be told that one of them is missing."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT


@functools.cache
def why_no_namespaces() -> str:
    """Empty where a test can have a network and a /dev/shm of its own."""
    command = [*unshare_command(), "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    tried = subprocess.run(command, capture_output=True, text=True)
    return tried.stderr.strip() and f"this machine: no namespaces: {tried.stderr.strip()}"


def unshare_command() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--mount", "--net", "--"]


def needs_namespaces(test: Callable[..., Any]) -> Callable[..., Any]:
    """Skips a test where there are none, which is tried once such a test runs."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        if why := why_no_namespaces():
            pytest.skip(why)
        return test(*args, **kwargs)

    return run


def needs_root(test: Callable[..., Any]) -> Callable[..., Any]:
    """Skips a test that becomes another user."""
    return pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")(test)


@contextlib.contextmanager
def cgroup(num_bytes: int) -> Iterator[str]:
    """A memory cgroup with this limit: the file that a process's id is written to."""
    group = _make_cgroup(num_bytes)
    try:
        yield str(group / "cgroup.procs")
    finally:
        _remove_cgroup(group)


def _make_cgroup(num_bytes: int) -> Path:
    why = ""
    for root, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", root, f"engram-{uuid.uuid4().hex[:12]}")
        try:
            group.mkdir()
        except OSError as error:
            why = str(error)
            continue
        try:
            (group / limit).write_text(str(num_bytes))
        except OSError as error:
            why = str(error)
            group.rmdir()
            continue
        return group
    pytest.skip(f"this machine: no memory cgroup can be made: {why}")


def _remove_cgroup(group: Path) -> None:
    deadline = time.monotonic() + 5
    while True:
        try:
            group.rmdir()
        except OSError:  # processes that have just ended are in it for a moment
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


@functools.cache
def points_library() -> Path:
    """The library that stops at points, which CMake's preset "sanitize" builds: a copy, for another
    session may build it anew while processes of this one load it."""
    build = ROOT / "build/sanitize"
    build.mkdir(parents=True, exist_ok=True)
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for step in (
            ["--preset", "sanitize", "--log-level=WARNING"],
            ["--build", "--preset", "sanitize", "--target", "trtllm_engram"],
        ):
            built = subprocess.run(
                ["cmake", *step], cwd=ROOT / "cpp", env=tools, capture_output=True, text=True
            )
            assert built.returncode == 0, built.stdout + built.stderr
        folder = Path(tempfile.mkdtemp(prefix="engram-points-"))
        atexit.register(shutil.rmtree, folder)
        return Path(shutil.copy2(build / "libtrtllm_engram.so", folder))


@functools.cache
def library_environment(library: Path) -> dict[str, str]:
    """What a process needs to load a library with sanitizers, and to find it as trtllm_engram's."""
    linked = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    # NOTE: they must be there before Python is; libstdc++ too, for what they replace of it.
    names = ("libasan", "libubsan", "libstdc++")
    paths = [re.search(rf"{re.escape(name)}\.so\S* => (\S+)", linked) for name in names]
    return {
        "PYTHONPATH": str(_import_tree(library)),
        "LD_PRELOAD": " ".join(path[1] for path in paths if path),
        "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=16",  # leaks are Python's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _import_tree(library: Path) -> Path:
    """A folder for PYTHONPATH in which trtllm_engram has another library."""
    tree = Path(tempfile.mkdtemp(prefix="engram-points-"))
    atexit.register(shutil.rmtree, tree)
    package = tree / "trtllm_engram"
    (package / "plugins").mkdir(parents=True)
    for name in ("builder", "runtime"):
        (package / name).symlink_to(ROOT / name)
    # It looks for the library beside its own file: a copy, for a link is followed.
    for file in (ROOT / "plugins").glob("*.py"):
        shutil.copy2(file, package / "plugins")
    (package / "plugins" / library.name).symlink_to(library)
    return tree
