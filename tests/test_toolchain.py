# SPDX-License-Identifier: Apache-2.0
"""The scripts that find nvcc and TensorRT's headers, and the conftest's rule for required parts."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from checkout import ROOT

from trtllm_engram.plugins import library_path

PASSING, SKIPPING = "def test_it(): pass", "import pytest\ndef test_it(): pytest.skip('none here')"
GROUPED = """
import pathlib, pytest
@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(4))
def test_it(number, worker_id):
    pathlib.Path(__file__).with_name(worker_id).touch()
"""


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "cpp/cmake")
    return importlib.import_module("tensorrt_headers")


@pytest.fixture
def toolchain(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "cpp/cmake")
    return importlib.import_module("toolchain")


def fake_headers(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "NvInferVersion.h").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#define NV_TENSORRT_MAJOR 10 //!<\n#define NV_TENSORRT_MINOR 6\n", (10, 6)),
        (
            "#define TRT_MAJOR_ENTERPRISE 11\n#define TRT_MINOR_ENTERPRISE 4\n"
            "#define TRT_PATCH_ENTERPRISE 1\n#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE\n",
            (11, 4, 1),
        ),
        ("no version", (0,)),
    ],
    ids=["10.6", "11.4", "none"],
)
def test_header_version(headers: ModuleType, tmp_path: Path, text: str, expected: tuple) -> None:
    assert headers.version(fake_headers(tmp_path / "include", text)) == expected
    assert headers.version(tmp_path / "absent") == (0,)


def test_tensorrt_root_comes_first(
    headers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path))
    own = fake_headers(
        tmp_path / "include", "#define NV_TENSORRT_MAJOR 10\n#define NV_TENSORRT_MINOR 9\n"
    )
    assert headers.find() == own
    (own / "NvInferVersion.h").write_text("#define NV_TENSORRT_MAJOR 8\n")
    assert headers.find() != own


def test_a_changed_header_is_refused(headers: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "kernel_lens.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in headers.expected_sums():
            archive.writestr(f"{headers.WHEEL_FOLDER}/{name}", "something else")
    with pytest.raises(SystemExit, match=r"NvInfer\w*\.h: SHA-256 expected \w{64}, found \w{64}"):
        headers.unpack(wheel, tmp_path / "headers")
    assert list(tmp_path.iterdir()) == [wheel]


def fake_nvcc(home: Path, release: str) -> Path:
    nvcc = home / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return nvcc


@pytest.mark.parametrize(("release", "taken"), [("12.8", True), ("13.1", True), ("12.6", False)])
def test_nvcc_of_the_machine(
    toolchain: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    taken: bool,
) -> None:
    nvcc = fake_nvcc(tmp_path, release)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert (toolchain.find_nvcc() == nvcc) == taken


def test_cpu_build_requires_nothing(toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    monkeypatch.setattr(toolchain.tensorrt_headers, "find", lambda: None)
    monkeypatch.setenv("ENGRAM_CUDA", "OFF")
    assert toolchain.missing_requirements() == []
    monkeypatch.setenv("ENGRAM_CUDA", "ON")
    assert toolchain.missing_requirements() == [toolchain.NVCC_REQUIREMENT, "pip"]


@pytest.mark.parametrize(
    ("required", "body", "code"),
    [
        ("", SKIPPING, 0),
        ("gpu", SKIPPING, 1),
        ("trt", SKIPPING, 0),
        ("gpu", PASSING, 0),
        ("x", PASSING, 4),
    ],
    ids=["not-required", "required", "another", "passes", "unknown"],
)
def test_required_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: str, body: str, code: int
) -> None:
    monkeypatch.setenv("TRTLLM_ENGRAM_REQUIRE", required)
    marked = f"import pytest\npytestmark = pytest.mark.gpu\n{body}\n"
    assert run_pytest(tmp_path, "NEEDS.clear()", marked).returncode == code


@pytest.mark.parametrize(("required", "code"), [("trt", 0), ("gpu", 4), ("gpu,trt", 4)])
def test_only_the_missing_part_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: str, code: int
) -> None:
    """A test of two parts, one of which the machine has."""
    monkeypatch.setenv("TRTLLM_ENGRAM_REQUIRE", required)
    needs = "NEEDS.update(gpu=lambda: 'no GPU here', trt=lambda: '')"
    marked = "import pytest\npytestmark = [pytest.mark.gpu, pytest.mark.trt]\n" + PASSING
    assert run_pytest(tmp_path, needs, marked).returncode == code


def test_a_machine_without_what_is_required_starts_no_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTLLM_ENGRAM_REQUIRE", "gpu,slow")
    result = run_pytest(tmp_path, "NEEDS.update(gpu=lambda: 'no GPU here')", PASSING)
    text = "expected a machine that runs tests of gpu, found: no GPU here"
    assert_one_line(result, f"TRTLLM_ENGRAM_REQUIRE: {text}")


def test_an_older_library_starts_no_test(tmp_path: Path) -> None:
    newer = "from trtllm_engram.runtime import _native\n_native._SYMBOLS['newer'] = (None, [])"
    result = run_pytest(tmp_path, newer, PASSING)
    text = "expected the symbol newer, found none: the library is older than the sources"
    assert_one_line(result, f"{library_path()}: {text}: make build")


def test_packages_that_tests_on_a_gpu_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in one line, with the command that brings them."""
    monkeypatch.setenv("TRTLLM_ENGRAM_REQUIRE", "gpu")
    packages = "{'no_such.part': 'one', 'numpy': 'numpy', 'none_such': 'other'}"
    result = run_pytest(tmp_path, f"NEEDS['gpu'] = lambda: why_no_packages({packages})", PASSING)
    text = "expected a machine that runs tests of gpu, found: no packages one, other"
    assert_one_line(result, f"TRTLLM_ENGRAM_REQUIRE: {text}: .venv/bin/pip install one other")


def assert_one_line(result: subprocess.CompletedProcess[str], text: str) -> None:
    assert (result.returncode, result.stdout.strip()) == (4, "")
    assert result.stderr.strip() == f"ERROR: {text}"


def test_the_last_lines_say_what_was_not_run(tmp_path: Path) -> None:
    """After all else but pytest's own count, with the command that runs it."""
    needs = "NEEDS.update(gpu=lambda: 'no GPU here', trt=lambda: '', engine=lambda: 'none')"
    marked = "import pytest\npytestmark = [pytest.mark.gpu, pytest.mark.engine]\n" + PASSING
    *_, first, second, count = run_pytest(tmp_path, needs, marked).stdout.splitlines()
    assert first == (
        "NOT RUN: 1 tests that need engine: none; `.venv/bin/pip install tensorrt` brings it"
    )
    assert second.startswith("NOT RUN: 1 tests that need gpu: no GPU here; `make test-gpu` on a ")
    assert "1 skipped" in count


@pytest.mark.parametrize("marker", ["trt", "multiproc"])
def test_the_last_lines_say_which_tensorrt_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: str
) -> None:
    """Where tests of it ran in others. What may not skip may not leave one out either, unless
    TENSORRT_ROOT names the one to take."""
    left = (
        "tensorrt_installs.left_out = lambda: ('.tensorrt/10.6: another comes first; `it` runs',)"
    )
    needs = f"NEEDS.update(trt=lambda: '')\n{left}"
    marked = f"import pytest\npytestmark = pytest.mark.{marker}\n{PASSING}"
    line = "NOT RUN: tests that need trt in .tensorrt/10.6: another comes first; `it` runs"
    monkeypatch.delenv("TRTLLM_ENGRAM_REQUIRE", raising=False)
    monkeypatch.delenv("TENSORRT_ROOT", raising=False)
    *_, last, _count = run_pytest(tmp_path, needs, marked).stdout.splitlines()
    assert (last == line) == (marker == "trt")
    monkeypatch.setenv("TRTLLM_ENGRAM_REQUIRE", marker)
    result = run_pytest(tmp_path, needs, marked)
    if marker != "trt":
        assert result.returncode == 0
        return
    text = "expected tests of trt in every TensorRT, found .tensorrt/10.6: another comes first; "
    assert_one_line(result, f"TRTLLM_ENGRAM_REQUIRE: {text}`it` runs")


def test_a_group_of_tests_has_one_worker(tmp_path: Path) -> None:
    """What pytest and xdist make of the mark that keeps servers and builds apart."""
    result = run_pytest(tmp_path, "", GROUPED, "--numprocesses=2", "--dist=loadgroup")
    assert result.returncode == 0, result.stdout
    assert len(list(tmp_path.glob("gw*"))) == 1


def run_pytest(
    folder: Path, needs: str, test: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """A test module's run under the suite's conftest with other NEEDS."""
    conftest = (ROOT / "tests/conftest.py").read_text(encoding="utf-8")
    (folder / "conftest.py").write_text(f"{conftest}\n{needs}\n")
    (folder / "test_it.py").write_text(test)
    helpers = f"pythonpath={ROOT / 'tests'}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", helpers]
    return subprocess.run(
        [*command, *options, folder], cwd=folder, capture_output=True, text=True, check=False
    )
