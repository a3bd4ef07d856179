# SPDX-License-Identifier: Apache-2.0
"""Wheels and installs: all for the CPU alone, from a copy of the checkout whose path is awkward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from checkout import ROOT, copy_checkout

pytestmark = pytest.mark.xdist_group("packaging")  # one worker: they share the copy's builds

BIN = Path(sys.executable).parent
SMOKE = """
import json, pathlib, sys
import trtllm_engram.builder, trtllm_engram.plugins, trtllm_engram.runtime
from trtllm_engram.runtime import _native
assert not {"builder", "plugins", "runtime"} & set(sys.modules)
print(json.dumps([str(trtllm_engram.plugins.library_path()), _native.build_info()]))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("packaging") / "a checkout é"
    copy_checkout(target)
    return target


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """Scripts folder of an environment with nothing in it but pip."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    return tmp_path / "venv/bin"


@pytest.fixture(scope="module")
def wheel(copy: Path) -> Path:
    build = [BIN / "python", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    run(*build, "-w", copy.parent, copy)
    return next(copy.parent.glob("*.whl"))


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Runs outside the checkout, where no folder of ours can be imported by accident."""
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
    environment["ENGRAM_CUDA"] = "OFF"
    result = subprocess.run(
        list(map(str, command)),
        cwd=cwd or "/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def smoke(venv: Path) -> tuple[Path, dict[str, object]]:
    """Imports the three packages and loads the library; returns its path and build info."""
    assert "0.1.0" in run(venv / "trtllm-engram", "--version")
    path, info = json.loads(run(venv / "python", "-c", SMOKE))
    assert info["cuda"] == ""
    return Path(path), info


def test_wheel_content(wheel: Path) -> None:
    assert wheel.name == "trtllm_engram-0.1.0-py3-none-manylinux_2_34_x86_64.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "trtllm_engram",
        "trtllm_engram-0.1.0.dist-info",
    }
    for folder in ("builder", "plugins", "runtime"):
        assert f"trtllm_engram/{folder}/py.typed" in names
        for source in (ROOT / folder).rglob("*.py"):
            assert f"trtllm_engram/{source.relative_to(ROOT)}" in names
    assert "trtllm_engram/plugins/libtrtllm_engram.so" in names
    assert "trtllm_engram-0.1.0.dist-info/licenses/LICENSE" in names


def test_wheel_in_a_clean_environment(wheel: Path, venv: Path) -> None:
    run(BIN / "uv", "pip", "install", "--python", venv / "python", wheel)
    path, _ = smoke(venv)
    assert path.is_relative_to(venv.parent)


@pytest.mark.slow
def test_pip_install_twice(copy: Path, venv: Path) -> None:
    for _ in range(2):  # the second meets the folders that the first left
        run(venv / "python", "-m", "pip", "install", "--force-reinstall", copy)
        smoke(venv)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "strict"])
def test_editable_install(copy: Path, venv: Path, mode: str) -> None:
    settings = ["--config-settings", "editable_mode=strict"] if mode == "strict" else []
    run(venv / "python", "-m", "pip", "install", *settings, "--editable", copy)
    path, _ = smoke(venv)
    assert path == copy / "plugins/libtrtllm_engram.so"


@pytest.mark.slow
def test_uv_builds_sdist_then_wheel(copy: Path, venv: Path, tmp_path: Path) -> None:
    run(BIN / "uv", "build", "--python", venv / "python", "--out-dir", tmp_path, copy)
    run(BIN / "uv", "pip", "install", "--python", venv / "python", *tmp_path.glob("*.whl"))
    smoke(venv)
    assert list(tmp_path.glob("trtllm_engram-0.1.0.tar.gz"))


@pytest.mark.slow
def test_uv_pip_install(copy: Path, venv: Path) -> None:
    run(BIN / "uv", "pip", "install", "--python", venv / "python", copy)
    smoke(venv)


def test_packages_are_not_importable_from_the_top() -> None:
    assert not {"builder", "plugins", "runtime"} & set(sys.modules)


@pytest.fixture
def machine_without(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A PATH folder with what make needs, less one tool."""
    for folder in (Path("/bin"), Path("/usr/bin"), Path(sys.base_prefix) / "bin"):
        for tool in folder.iterdir():
            link = tmp_path / tool.name
            if tool.name != request.param and not link.is_symlink():
                link.symlink_to(tool)
    return tmp_path


@pytest.mark.parametrize("machine_without", ["g++", "git"], indirect=True)
def test_make_names_missing_packages(
    machine_without: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("bare")
    for name in ("Makefile", "pyproject.toml"):
        (target / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("builder", "cpp", "plugins", "runtime"):
        (target / folder).mkdir()
    result = subprocess.run(
        [machine_without / "make"],
        cwd=target,
        env={"PATH": str(machine_without)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "apt-get install -y python3 python3-venv g++ make git" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (target / ".venv").exists()
