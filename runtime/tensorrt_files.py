# SPDX-License-Identifier: Apache-2.0
"""Where TensorRT's libraries lie. None is loaded: that takes a second and half a gigabyte."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_SYSTEM_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
    "usr/local/tensorrt/lib",
    "usr/local/cuda/lib64",
    "opt/tensorrt/lib",
)
_PACKAGE_FOLDERS = ("tensorrt_libs", "tensorrt")


@dataclass(frozen=True)
class TensorRtFiles:
    version: str  # "10.6.0"; only the major number where the file name tells no more
    library: Path


def find_tensorrt(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    python_path: tuple[str, ...] | None = None,
) -> list[TensorRtFiles]:
    """Every libnvinfer.so.N, in the order in which a build or the loader would find it."""
    found: dict[Path, TensorRtFiles] = {}
    for folder in _folders(root, environ, tuple(sys.path) if python_path is None else python_path):
        for library in sorted(folder.glob("libnvinfer.so.[0-9]*")):
            real = library.resolve()
            if real not in found:
                found[real] = TensorRtFiles(_version(library, real), library)
    return list(found.values())


def _folders(
    root: Path, environ: Mapping[str, str], python_path: tuple[str, ...]
) -> Iterator[Path]:
    if environ.get("TENSORRT_ROOT"):
        yield Path(environ["TENSORRT_ROOT"], "lib")
    yield from (Path(folder) for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder)
    for entry in python_path:
        yield from (Path(entry, name) for name in _PACKAGE_FOLDERS)
    yield from (root / folder for folder in _SYSTEM_FOLDERS)


def _version(library: Path, real: Path) -> str:
    number = max((path.name.removeprefix("libnvinfer.so.") for path in (library, real)), key=len)
    if re.fullmatch(r"\d+\.\d+.*", number) or library.parent.name not in _PACKAGE_FOLDERS:
        return number
    return _package_version(library.parent.parent, number)


def _package_version(site_packages: Path, major: str) -> str:
    """pip names libraries by their major number alone; the package beside them knows the rest."""
    for distribution in importlib.metadata.distributions(path=[str(site_packages)]):
        name = distribution.metadata["Name"] or ""
        if re.fullmatch(r"tensorrt[-_](cu\d+[-_])?libs", name):
            return distribution.version
    return major
