# SPDX-License-Identifier: Apache-2.0
"""The TensorRT versions that tests can use: those of `make tensorrt`, else what the machine has."""

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
    return _fetched() or _machine()


def _fetched() -> tuple[Install, ...]:
    return tuple(
        Install(folder.name, library, folder / "python")
        for folder in sorted(ROOT.glob(".tensorrt/[0-9]*"))
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
