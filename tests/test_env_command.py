# SPDX-License-Identifier: Apache-2.0
"""`trtllm-engram env`: the line that shells take, for the TensorRT that is found first."""

import json
import shlex

import pytest

from trtllm_engram.plugins import library_path
from trtllm_engram.runtime.cli import main

PRELOAD = "LD_PRELOAD"


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
    name, _, value = shlex.split(capsys.readouterr().out)[0].partition("=")
    assert name == PRELOAD
    assert value.split() == [str(library), str(library_path())]


def test_json(tensorrt, capsys):
    library = tensorrt("trt", "libnvinfer.so.11.2.1")
    assert main(["env", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {PRELOAD: f"{library} {library_path()}", "tensorrt": "11.2.1"}


def test_tables_too(tensorrt, capsys, tmp_path):
    """As prefix of a command, or as lines of a script; the file by its whole path."""
    library = tensorrt("trt", "libnvinfer.so.10")
    file = tmp_path / "tables of mine.toml"
    file.touch()
    expected = [f"{PRELOAD}={library} {library_path()}", f"TRTLLM_ENGRAM_TABLES={file}"]
    assert main(["env", "--tables", str(file)]) == 0
    assert shlex.split(capsys.readouterr().out) == expected
    assert main(["env", "--tables", str(file), "--export"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [shlex.split(line) for line in lines] == [["export", word] for word in expected]
    assert main(["env", "--tables", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["TRTLLM_ENGRAM_TABLES"] == str(file)


@pytest.mark.parametrize("name", ["none.toml", "a$(touch b)"])
def test_tables_that_cannot_be(tensorrt, capsys, tmp_path, name):
    tensorrt("trt", "libnvinfer.so.10")
    if name != "none.toml":
        (tmp_path / name).touch()
    assert main(["env", "--tables", str(tmp_path / name)]) == 2
    assert name in capsys.readouterr().err


def test_none(monkeypatch, capsys):
    monkeypatch.setattr("trtllm_engram.runtime.cli.env.find_tensorrt", list)
    assert main(["env"]) == 1
    assert "TensorRT: expected libnvinfer.so.N in TENSORRT_ROOT/lib" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["with space", "a$(touch b)", "a`b`", 'a"b', "a\\b"])
def test_what_loader_and_shell_would_take_apart(tensorrt, capsys, name):
    tensorrt(name, "libnvinfer.so.10")
    assert main(["env"]) == 2
    assert "LD_PRELOAD: expected paths without spaces" in capsys.readouterr().err
