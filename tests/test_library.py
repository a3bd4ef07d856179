# SPDX-License-Identifier: Apache-2.0
"""What the built libtrtllm_engram.so exports, needs and says of itself."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT

from trtllm_engram.plugins import library_path
from trtllm_engram.runtime import _native

EXPORTS = {"getCreators", "getPluginCreators", "setLoggerFinder"}
TRITON = {
    f"TRITONBACKEND_{name}"
    for name in (
        *("ModelBatchIncludeRequest", "ModelBatchInitialize", "ModelBatchFinalize"),
        *("ModelBatcherInitialize", "ModelBatcherFinalize"),
        *("Initialize", "Finalize", "GetBackendAttribute", "ModelInitialize", "ModelFinalize"),
        *("ModelInstanceInitialize", "ModelInstanceFinalize", "ModelInstanceExecute"),
    )
}


def binutils(*command: str) -> str:
    return subprocess.run(
        [*command, library_path()], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def exports() -> set[str]:
    return {line.split()[-1] for line in binutils("nm", "-D", "--defined-only").splitlines()}


def test_exports_nothing_else(exports: set[str]) -> None:
    assert {name for name in exports if not name.startswith("engram_")} <= EXPORTS | TRITON


def test_exports_every_declared_function(exports: set[str]) -> None:
    header = (ROOT / "cpp/include/engram/engram.h").read_text(encoding="utf-8")
    declared = set(re.findall(r"^ENGRAM_API [^;(]*?\b(engram_\w+)\(", header, re.MULTILINE))
    assert len(declared) > 5
    assert declared == {name for name in exports if name.startswith("engram_")}


def test_exports_what_tensorrt_looks_up(exports: set[str]) -> None:
    if not _native.build_info()["cuda"]:
        pytest.skip("the library is built for the CPU alone, without plugins")
    assert exports >= EXPORTS


def test_exports_what_triton_looks_up(exports: set[str]) -> None:
    assert exports >= TRITON


def test_needs_only_system_libraries() -> None:
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", binutils("readelf", "-d")))
    allowed = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
    assert needed <= allowed


@pytest.mark.parametrize(
    ("prefix", "newest"),
    [("GLIBC", (2, 34)), ("GLIBCXX", (3, 4, 29)), ("CXXABI", (1, 3, 13))],
)
def test_runs_on_manylinux_2_34(prefix: str, newest: tuple[int, ...]) -> None:
    found = re.findall(rf"\b{prefix}_([\d.]+)", binutils("readelf", "--version-info", "--wide"))
    versions = {tuple(map(int, version.split("."))) for version in found}
    assert versions
    assert max(versions) <= newest


def test_build_info() -> None:
    info = _native.build_info()
    assert list(info) == [
        "version",
        "abi",
        "git",
        "compiler",
        "cuda",
        "architectures",
        "tensorrt_headers",
        "minimum_driver",
    ]
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{info["version"]}"' in pyproject
    if info["cuda"]:
        assert info["minimum_driver"] == ("580.0" if info["cuda"].startswith("13.") else "525.60")
    else:
        assert (info["architectures"], info["tensorrt_headers"], info["minimum_driver"]) == (
            "",
        ) * 3


def test_lies_in_the_checkout() -> None:
    assert library_path() == Path(ROOT / "plugins/libtrtllm_engram.so")
