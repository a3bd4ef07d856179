# SPDX-License-Identifier: Apache-2.0
"""`trtllm-engram env`: the line that shells take, for the TensorRT that is found first."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tensorrt_installs import each_install

from trtllm_engram.plugins import library_path
from trtllm_engram.runtime.cli import main
from trtllm_engram.runtime.tensorrt_files import TensorRtFiles

PRELOAD = "LD_PRELOAD"
FOLDERS = "LD_LIBRARY_PATH"


@pytest.fixture(autouse=True)
def _no_folders(monkeypatch):
    monkeypatch.delenv(FOLDERS, raising=False)


@pytest.fixture
def tensorrt(tmp_path, monkeypatch):
    """Makes a folder with a libnvinfer of this name, the first to be found."""

    def make(folder, name):
        (tmp_path / folder / "lib").mkdir(parents=True)
        (tmp_path / folder / "lib" / name).touch()
        monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path / folder))
        return tmp_path / folder / "lib" / name

    return make


def test_a_shell_takes_it(tensorrt, capsys):
    """TensorRT comes first: the plugins register with what is loaded."""
    library = tensorrt("trt", "libnvinfer.so.10")
    assert main(["env"]) == 0
    assert shlex.split(capsys.readouterr().out) == [
        f"{PRELOAD}={library} {library_path()}",
        f"{FOLDERS}={library.parent}",
    ]


def test_folders_of_before(tensorrt, capsys, monkeypatch):
    """They follow TensorRT's own, each once; an empty one would be the current folder."""
    library = tensorrt("trt", "libnvinfer.so.10")
    monkeypatch.setenv(FOLDERS, f"/a b::{library.parent}:/c")
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[FOLDERS] == f"{library.parent}:/a b:/c"
    monkeypatch.setenv(FOLDERS, "/a$b")
    assert main(["env"]) == 2
    assert "LD_LIBRARY_PATH: expected none of" in capsys.readouterr().err


@pytest.mark.trt
@each_install
def test_programs_that_need_the_parser(install, capsys, monkeypatch):
    """libnvonnxparser lies beside libnvinfer, where the loader would not look."""
    monkeypatch.setenv("TENSORRT_ROOT", str(install.library.parents[1]))
    assert main(["env"]) == 0
    variables = shlex.split(capsys.readouterr().out)
    name = f"libnvonnxparser.{install.library.name.partition('.')[2]}"
    code = f"import ctypes; ctypes.CDLL({name!r})"
    subprocess.run(["env", *variables, sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("folder", "named"), [("/usr/lib/x86_64-linux-gnu", False), ("/usr/local/lib", True)]
)
def test_the_loaders_own_folder_stays_behind_others(capsys, monkeypatch, folder, named):
    files = [TensorRtFiles("10", Path(folder, "libnvinfer.so.10"))]
    monkeypatch.setattr("trtllm_engram.runtime.cli.env.find_tensorrt", lambda: files)
    assert main(["env", "--json"]) == 0
    assert (FOLDERS in json.loads(capsys.readouterr().out)) == named


def test_json(tensorrt, capsys):
    library = tensorrt("trt", "libnvinfer.so.11.2.1")
    assert main(["env", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        PRELOAD: f"{library} {library_path()}",
        FOLDERS: str(library.parent),
        "tensorrt": "11.2.1",
    }


def test_tables_too(tensorrt, capsys, tmp_path):
    """As prefix of a command, or as lines of a script; the file by its whole path."""
    library = tensorrt("trt", "libnvinfer.so.10")
    file = tmp_path / "tables of mine.toml"
    file.touch()
    expected = [
        f"{PRELOAD}={library} {library_path()}",
        f"{FOLDERS}={library.parent}",
        f"TRTLLM_ENGRAM_TABLES={file}",
    ]
    assert main(["env", "--tables", str(file)]) == 0
    assert shlex.split(capsys.readouterr().out) == expected
    assert main(["env", "--tables", str(file), "--export"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [shlex.split(line) for line in lines] == [["export", word] for word in expected]
    assert main(["env", "--tables", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["TRTLLM_ENGRAM_TABLES"] == str(file)


@pytest.mark.parametrize("name", ["none.toml", "a$(touch b)"])
def test_tables_that_cannot_be(capsys, tmp_path, name):
    """Said whether or not there is a TensorRT."""
    if name != "none.toml":
        (tmp_path / name).touch()
    assert main(["env", "--tables", str(tmp_path / name)]) == 2
    assert name in capsys.readouterr().err


def test_none(monkeypatch, capsys):
    monkeypatch.setattr("trtllm_engram.runtime.cli.env.find_tensorrt", list)
    monkeypatch.delenv("TENSORRT_ROOT", raising=False)
    assert main(["env"]) == 1
    assert "TensorRT: expected libnvinfer.so.N in TENSORRT_ROOT/lib" in capsys.readouterr().err
    monkeypatch.setenv("TENSORRT_ROOT", "/no/such")
    assert main(["env"]) == 1
    assert "in TENSORRT_ROOT/lib (/no/such/lib), LD_LIBRARY_PATH" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["with space", "a$(touch b)", "a`b`", 'a"b', "a\\b"])
def test_what_loader_and_shell_would_take_apart(tensorrt, capsys, name):
    tensorrt(name, "libnvinfer.so.10")
    assert main(["env"]) == 2
    assert "LD_PRELOAD: expected paths without spaces" in capsys.readouterr().err
