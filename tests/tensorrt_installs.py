# SPDX-License-Identifier: Apache-2.0
"""The TensorRT versions that tests can use: the one that TENSORRT_ROOT names, else what the machine
has, else those of `make tensorrt`. Only one whose Python bindings import counts as there."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trtllm_engram.plugins.registration import TENSORRT_MODULES
from trtllm_engram.runtime.tensorrt_files import find_tensorrt

ROOT = Path(__file__).resolve().parents[1]

# The first module of the arguments that imports: its name, its version and the library it loaded.
_IMPORT = """
import importlib, json, sys
errors = []
for name in sys.argv[1:]:
    try:
        version = importlib.import_module(name).__version__
    except (ImportError, OSError, AttributeError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        errors += [] if missing else [f"{name}: {error}"]
        continue
    maps = [line.split() for line in open("/proc/self/maps") if "/libnvinfer.so" in line]
    print(json.dumps([name, version, maps[0][-1] if maps else ""]))
    break
else:
    sys.exit("; ".join(" ".join(error.split()) for error in errors))
"""


Place = tuple[Path | None, Path | None]  # libnvinfer.so.N, bindings; None: as Python finds it


@dataclass(frozen=True)
class Install:
    version: str
    library: Path  # libnvinfer.so.N
    module: str  # of TENSORRT_MODULES
    bindings: Path | None  # for PYTHONPATH; None where this environment has them

    def environment(self) -> dict[str, str]:
        """For a process that imports this TensorRT and no other."""
        return _environment(self.library.parent, self.bindings)


def installs() -> tuple[Install, ...]:
    return _search()[0]


def why_none() -> str:
    """Empty where there is one."""
    return _search()[1]


@functools.cache
def left_out() -> tuple[str, ...]:
    """What `make tensorrt` brought and no test runs in: which version, why, and what would."""
    found = installs()
    used = {install.library.resolve() for install in found}
    lines = []
    for folder in _fetched():
        libraries = _libraries(folder)
        if not libraries or used & {library.resolve() for library in libraries}:
            continue
        first = f"{found[0].version} ({found[0].library}) comes first" if found else ""
        problems = [_probe(*place) for place in _inside(folder)]
        why = next((one for one in problems if isinstance(one, str)), first)
        name = folder.relative_to(ROOT)
        command = f"TENSORRT_ROOT={name} make test" if why == first else "make tensorrt"
        lines.append(f"{name}: {why}; `{command}` runs them")
    return tuple(lines)


def check_named() -> None:
    """UsageError where TENSORRT_ROOT names a place without a library."""
    root = os.environ.get("TENSORRT_ROOT")
    if root and not _libraries(Path(root)):
        raise pytest.UsageError(
            f"TENSORRT_ROOT: expected libnvinfer.so.N in {root}/lib, found none"
        )


@functools.cache
def _search() -> tuple[tuple[Install, ...], str]:
    """What is there or, where nothing is, why."""
    problems = []
    for origin, found in _origins():
        tried = [_probe(*place) for place in found]
        if usable := tuple(one for one in tried if isinstance(one, Install)):
            return usable, ""
        problems += [f"{origin}: {problem}" for problem in tried if problem]
    return (), next(iter(problems), "no TensorRT")


def _origins() -> Iterator[tuple[str, list[Place]]]:
    """In order: of the first origin that has any of use, all are taken."""
    if root := os.environ.get("TENSORRT_ROOT"):
        yield "TENSORRT_ROOT", _inside(Path(root))[:1]
        return
    yield "this Python", [(None, None)]
    for files in find_tensorrt():
        yield str(files.library), [(files.library, None)]
    yield ".tensorrt", [place for folder in _fetched() for place in _inside(folder)]


def _fetched() -> list[Path]:
    return sorted(ROOT.glob(".tensorrt/[0-9]*"))


def _inside(folder: Path) -> list[Place]:
    """bindings, where the folder has none, are this environment's."""
    bindings = folder / "python"
    has_bindings = any((bindings / name).is_dir() for name in TENSORRT_MODULES)
    return [(library, bindings if has_bindings else None) for library in _libraries(folder)]


def _libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("lib/libnvinfer.so.[0-9]*"))


def _probe(library: Path | None, bindings: Path | None) -> Install | str:
    """The install, or what it lacks; "" where nothing is there."""
    names = [name for name in TENSORRT_MODULES if bindings and (bindings / name).is_dir()]
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT, *(names or TENSORRT_MODULES)],
        env=_environment(library and library.parent, bindings),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        if reason := done.stderr.strip().rpartition("\n")[2]:
            return f"Python bindings that do not load: {reason}"
        return f"libraries without Python bindings: {_command(library)}" if library else ""
    module, version, loaded = json.loads(done.stdout)
    if not loaded or (library and not library.samefile(loaded)):
        return f"Python bindings {version} that load {loaded or 'no libnvinfer'}"
    return Install(version, library or Path(loaded), module, bindings)


def _command(library: Path) -> str:
    """TensorRT's archives have a wheel for each Python beside lib/."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = sorted(library.parents[1].glob(f"python/tensorrt-*-{tag}-*.whl"))
    of_its_version = "tensorrt_cu13_bindings (or cu12) of their version"
    return f".venv/bin/pip install {wheels[0] if wheels else of_its_version}"


def _environment(libraries: Path | None, bindings: Path | None) -> dict[str, str]:
    environment = dict(os.environ)
    for name, folder in (("LD_LIBRARY_PATH", libraries), ("PYTHONPATH", bindings)):
        if folder:
            rest = environment.get(name)
            environment[name] = f"{folder}:{rest}" if rest else str(folder)
    return environment


# For tests that run once in each. Where there is none, the marker trt has them skipped or failed.
each_install = pytest.mark.parametrize(
    "install", installs() or [None], ids=[install.version for install in installs()] or ["none"]
)
