# SPDX-License-Identifier: Apache-2.0
"""The TensorRT versions that tests can use: the one that TENSORRT_ROOT names, else those of `make
tensorrt`, else what the machine has."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Install:
    version: str
    library: Path  # libnvinfer.so.N
    bindings: Path | None  # for PYTHONPATH; None where this environment has them

    def environment(self) -> dict[str, str]:
        """For a process that imports this TensorRT and no other."""
        environment = dict(os.environ)
        for name, folder in (
            ("LD_LIBRARY_PATH", self.library.parent),
            ("PYTHONPATH", self.bindings),
        ):
            if folder:
                rest = environment.get(name)
                environment[name] = f"{folder}:{rest}" if rest else str(folder)
        return environment


@functools.cache
def installs() -> tuple[Install, ...]:
    return _named() or _fetched() or _machine()


def check_named() -> None:
    """UsageError where TENSORRT_ROOT names a place without a library."""
    root = os.environ.get("TENSORRT_ROOT")
    if root and not _named():
        raise pytest.UsageError(
            f"TENSORRT_ROOT: expected libnvinfer.so.N in {root}/lib, found none"
        )


def _named() -> tuple[Install, ...]:
    root = os.environ.get("TENSORRT_ROOT")
    return _inside(Path(root))[:1] if root else ()


def _fetched() -> tuple[Install, ...]:
    return tuple(
        install for folder in sorted(ROOT.glob(".tensorrt/[0-9]*")) for install in _inside(folder)
    )


def _inside(folder: Path) -> tuple[Install, ...]:
    """bindings, where the folder has none, are this environment's."""
    bindings = folder / "python"
    return tuple(
        Install(folder.name, library, bindings if bindings.is_dir() else None)
        for library in sorted(folder.glob("lib/libnvinfer.so.*"))
    )


def _machine() -> tuple[Install, ...]:
    from trtllm_engram.runtime.tensorrt_files import find_tensorrt

    if not any(importlib.util.find_spec(name) for name in ("tensorrt", "tensorrt_bindings")):
        return ()
    return tuple(Install(files.version, files.library, None) for files in find_tensorrt()[:1])


# For tests that run once in each. Where there is none, the marker trt has them skipped or failed.
each_install = pytest.mark.parametrize(
    "install", installs() or [None], ids=[install.version for install in installs()] or ["none"]
)
