# SPDX-License-Identifier: Apache-2.0
"""`make tensorrt` where a version is there already, but perhaps for another Python."""

import importlib
import sys
import zipfile

import pytest
from checkout import ROOT

THIS = f"cp{sys.version_info.major}{sys.version_info.minor}"
OTHER = "cp27"


def wheel(folder, tag):
    """Bindings in name alone."""
    info = "made_bindings-1.0.dist-info"
    files = {
        "tensorrt_bindings/__init__.py": f"TAG = {tag!r}\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: made-bindings\nVersion: 1.0\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}-none-any\n",
        f"{info}/RECORD": "",
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"made_bindings-1.0-{tag}-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


@pytest.fixture
def script(monkeypatch, tmp_path):
    """fetch_tensorrt, whose pip finds the wheels of tmp_path/wheels and nothing else."""
    pytest.importorskip("pip", reason="this Python: no pip")
    monkeypatch.syspath_prepend(ROOT / "cpp/cmake")
    script = importlib.import_module("fetch_tensorrt")
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(script, "TARGET", tmp_path / "made")
    made = script.Release("none", "none", "made_bindings==1.0", 10)
    monkeypatch.setattr(script, "RELEASES", {"10.6": made})
    (tmp_path / "made/10.6/lib").mkdir(parents=True)
    (tmp_path / "made/10.6/lib/libnvinfer.so.10").write_text("kept")
    return script


def unpacked(folder, tag):
    """As pip has installed them for some Python."""
    wheel(folder, tag)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder)


def tag_of(folder):
    return (folder / "made/10.6/python/tensorrt_bindings/__init__.py").read_text()


@pytest.mark.parametrize("old", [OTHER, None])
def test_bindings_of_another_python_are_replaced(script, tmp_path, capsys, old):
    wheel(tmp_path / "wheels", THIS)
    if old:
        unpacked(tmp_path / "made/10.6/python", old)
    script.fetch("10.6")
    assert tag_of(tmp_path) == f"TAG = {THIS!r}\n"
    assert (tmp_path / "made/10.6/lib/libnvinfer.so.10").read_text() == "kept"
    assert capsys.readouterr().out == f"TensorRT 10.6: bindings for Python {script.PYTHON}\n"
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["10.6"]
    script.fetch("10.6")
    assert capsys.readouterr().out == "TensorRT 10.6: there\n"


def test_no_bindings_for_this_python_are_one_line(script, tmp_path):
    """And nothing is lost."""
    wheel(tmp_path / "wheels", OTHER)
    unpacked(tmp_path / "made/10.6/python", OTHER)
    with pytest.raises(SystemExit) as stopped:
        script.fetch("10.6")
    start = f"made_bindings==1.0 for Python {script.PYTHON}: ERROR: Could not find a version"
    assert str(stopped.value).startswith(start)
    assert "\n" not in str(stopped.value)
    assert tag_of(tmp_path) == f"TAG = {OTHER!r}\n"
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["10.6"]
