# SPDX-License-Identifier: Apache-2.0
"""Which TensorRT tests run in: the one that the user names, the machine's, a fetched one; and what
is said where none has Python bindings."""

import os
import subprocess
import sys

import pytest
import tensorrt_installs

from trtllm_engram.plugins.registration import TENSORRT_MODULES
from trtllm_engram.runtime.tensorrt_files import TensorRtFiles

ABSENT = "raise ModuleNotFoundError('absent', name=__name__)"
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def made(folder):
    """A library like libnvinfer in name alone."""
    library = folder / "lib/libnvinfer.so.10"
    library.parent.mkdir(parents=True)
    command = ["g++", "-shared", "-x", "c++", "-", "-Wl,-soname,libnvinfer.so.10", "-o", library]
    subprocess.run(command, input=b"", check=True)
    return library


def bind(folder, module, version, library="libnvinfer.so.10"):
    """Bindings that load a library, by the loader's rules where it has no folder."""
    (folder / module).mkdir(parents=True, exist_ok=True)
    source = f"import ctypes\nctypes.CDLL({str(library)!r})\n__version__ = {version!r}\n"
    (folder / module / "__init__.py").write_text(source)


@pytest.fixture
def search(monkeypatch, tmp_path):
    """Of a machine with nothing but the folders of `make tensorrt`; site/ is its Python's."""
    for module in TENSORRT_MODULES:
        (tmp_path / "site" / module).mkdir(parents=True)
        (tmp_path / "site" / module / "__init__.py").write_text(ABSENT)
    for version in ("10.6", "11.2"):
        made(tmp_path / f".tensorrt/{version}")
        bind(tmp_path / f".tensorrt/{version}/python", "tensorrt_bindings", f"{version}.0")
    monkeypatch.setattr(tensorrt_installs, "ROOT", tmp_path)
    monkeypatch.setattr(tensorrt_installs, "find_tensorrt", list)
    monkeypatch.delenv("TENSORRT_ROOT", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/site:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(tensorrt_installs, "_search", tensorrt_installs._search.__wrapped__)
    return tensorrt_installs._search


left_out = tensorrt_installs.left_out.__wrapped__


def test_all_that_were_fetched(search):
    found, why = search()
    assert [one.version for one in found] == ["10.6.0", "11.2.0"]
    assert why == ""
    assert left_out() == ()


@pytest.mark.parametrize("module", TENSORRT_MODULES)
def test_an_installed_one_comes_first(search, tmp_path, module):
    """Under either name of its Python package."""
    library = made(tmp_path / "installed")
    bind(tmp_path / "site", module, "10.9.0", library)
    (one,) = search()[0]
    assert (one.version, one.module, one.library) == ("10.9.0", module, library)
    assert left_out() == tuple(
        f".tensorrt/{version}: 10.9.0 ({library}) comes first; "
        f"`TENSORRT_ROOT=.tensorrt/{version} make test` runs them"
        for version in ("10.6", "11.2")
    )


def test_a_fetched_one_for_another_python(search, tmp_path):
    """It is not left out in silence where others are there."""
    bind(tmp_path / ".tensorrt/10.6/python", "tensorrt_bindings", "10.6.0", "libno_such_thing.so")
    assert [one.version for one in search()[0]] == ["11.2.0"]
    (line,) = left_out()
    assert line.startswith(".tensorrt/10.6: Python bindings that do not load: tensorrt_bindings: ")
    assert line.endswith("; `make tensorrt` runs them")


def test_the_systems_library(search, monkeypatch, tmp_path):
    """With bindings it comes before those that were fetched; without, it is told."""
    library = made(tmp_path / "system")
    files = [TensorRtFiles("10", library)]
    monkeypatch.setattr(tensorrt_installs, "find_tensorrt", lambda: files)
    assert len(search()[0]) == 2
    monkeypatch.setattr(tensorrt_installs, "ROOT", tmp_path / "elsewhere")
    found, why = search()
    assert found == ()
    assert why.startswith(f"{library}: libraries without Python bindings: .venv/bin/pip install ")
    bind(tmp_path / "site", "tensorrt", "10.8.0")
    assert [(one.version, one.library) for one in search()[0]] == [("10.8.0", library)]


def test_the_named_one_alone(search, monkeypatch, tmp_path):
    bind(tmp_path / "site", "tensorrt", "10.9.0", made(tmp_path / "installed"))
    library = made(tmp_path / "mine")
    bind(tmp_path / "mine/python", "tensorrt_bindings", "10.7.0")
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path / "mine"))
    (one,) = search()[0]
    assert (one.version, one.library, one.bindings) == ("10.7.0", library, tmp_path / "mine/python")


def test_the_named_one_without_bindings(search, monkeypatch, tmp_path):
    """An archive as NVIDIA packs it: the wheel for this Python is what to install."""
    made(tmp_path / "mine")
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path / "mine"))
    start = "TENSORRT_ROOT: libraries without Python bindings: .venv/bin/pip install "
    assert search() == ((), f"{start}tensorrt_cu13_bindings (or cu12) of their version")
    wheel = tmp_path / f"mine/python/tensorrt-10.7.0-{TAG}-none-linux_x86_64.whl"
    wheel.parent.mkdir()
    wheel.touch()
    assert search() == ((), f"{start}{wheel}")


def test_bindings_of_another(search, monkeypatch, tmp_path):
    other = made(tmp_path / "other")
    bind(tmp_path / "site", "tensorrt", "10.9.0", other)
    made(tmp_path / "mine")
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path / "mine"))
    assert search() == ((), f"TENSORRT_ROOT: Python bindings 10.9.0 that load {other}")


def test_bindings_that_do_not_load(search, monkeypatch, tmp_path):
    bind(tmp_path / "site", "tensorrt", "10.9.0", "libno_such_thing.so")
    assert len(search()[0]) == 2
    monkeypatch.setattr(tensorrt_installs, "ROOT", tmp_path / "elsewhere")
    found, why = search()
    assert found == ()
    assert why.startswith("this Python: Python bindings that do not load: tensorrt: libno_such_")


def test_none(search, monkeypatch, tmp_path):
    monkeypatch.setattr(tensorrt_installs, "ROOT", tmp_path / "elsewhere")
    assert search() == ((), "no TensorRT")


def test_a_named_place_without_a_library(monkeypatch, tmp_path):
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path))
    with pytest.raises(pytest.UsageError, match=r"^TENSORRT_ROOT: expected libnvinfer\.so\.N in "):
        tensorrt_installs.check_named()
