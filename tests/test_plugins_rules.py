# SPDX-License-Identifier: Apache-2.0
"""Fields, clones, plans, timing-cache ids, types and shapes of every plugin, in C++: a harness
(cpp/tests/plugins) plays TensorRT's part, with no TensorRT loaded and beside each that is there."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest
from tensorrt_installs import Install, each_install

from trtllm_engram.plugins import library_path
from trtllm_engram.plugins.registration import plugin_fields

ROOT = Path(__file__).resolve().parents[1]
CPP = ROOT / "cpp"


def include_folders() -> list[Path]:
    """What the plugins themselves are built with, found as the build finds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(CPP / "cmake")
        nvcc = importlib.import_module("toolchain").find_nvcc()
        headers = importlib.import_module("tensorrt_headers").find()
    if not nvcc or not headers:
        pytest.skip("no CUDA or TensorRT headers here, as the library's build had them")
    return [CPP / "third_party", headers, Path(nvcc).parents[1] / "include"]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not plugin_fields():
        pytest.skip("the library is built for the CPU alone, without plugins")
    program = tmp_path_factory.mktemp("harness") / "engram_plugin_tests"
    includes = [f"-isystem{folder}" for folder in include_folders()]
    sources = map(str, sorted((CPP / "tests" / "plugins").glob("*.cpp")))
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Wshadow", "-Werror", *includes, *sources]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


@pytest.mark.xdist_group("plugin_harness")  # one worker compiles it
class TestRules:
    def test_without_tensorrt(self, harness: Path) -> None:
        run(harness, str(library_path()))

    @pytest.mark.trt
    @each_install
    def test_beside_tensorrt(self, harness: Path, install: Install) -> None:
        run(harness, str(library_path()), str(install.library))


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "| 0 failed" in " ".join(done.stdout.split())
