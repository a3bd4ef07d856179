# SPDX-License-Identifier: Apache-2.0
"""`trtllm-engram env`: the line that shells take, for the TensorRT that is found first."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tensorrt_installs import each_install

from trtllm_engram.builder.made_up import write_made_up_store
from trtllm_engram.plugins import library_path
from trtllm_engram.runtime.cli import main
from trtllm_engram.runtime.data_files import flash_layout
from trtllm_engram.runtime.tables import describe_tables
from trtllm_engram.runtime.tensorrt_files import TensorRtFiles

PRELOAD = "LD_PRELOAD"
FOLDERS = "LD_LIBRARY_PATH"
TABLES = """
format_version = 1
group = {rank = 2, size = 4}
[tables.engram_1]
store = "store"
layer = 1
formula_seed = 0
placement = "host"
"""


def tables_file(folder, text=TABLES, name="tables.toml"):
    """A file beside a store of V4.1-Flash's sizes, of which there is nothing but engram.json."""
    (folder / "store").mkdir()
    write_made_up_store(folder / "store", flash_layout().config)
    (folder / name).write_text(text)
    (folder / name).chmod(0o600)
    return folder / name


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
    """As prefix of a command, or as lines of a script; the file by its whole path. Tables of 203 GB
    that four ranks share are read about alone."""
    library = tensorrt("trt", "libnvinfer.so.10")
    file = tables_file(tmp_path, name="tables of mine.toml")
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
    assert describe_tables() == {}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("layer = 1", "layer = one"), "{folder}/tables.toml: line 6: expected TOML: "),
        (("layer = 1", "layer = 1\n["), "{folder}/tables.toml: expected TOML, found what no"),
        (("placement", "placment"), "expected known keys, found 'placment'; did you mean"),
        (("size = 4", "size = 0"), "tables.toml: group: size: expected 1 to 4096 ranks, found 0"),
        (('"store"', '"nothing"'), "table 'engram_1': {folder}/nothing: "),
        (("layer = 1", "layer = 7"), "table 'engram_1': {folder}/store/engram.json: expected a"),
        (("formula_seed = 0", ""), "table 'engram_1': {folder}/"),
    ],
    ids=["no TOML", "an end", "key", "group", "store", "layer", "table files"],
)
def test_tables_with_a_fault(capsys, tmp_path, change, fault):
    """Whatever a server would meet before it allocates is said here, in one line."""
    file = tables_file(tmp_path, TABLES.replace(*change))
    assert main(["env", "--tables", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trtllm-engram env: error: tables: ")
    assert fault.format(folder=tmp_path) in line


def test_tables_that_others_could_write(capsys, tmp_path):
    file = tables_file(tmp_path)
    file.chmod(0o666)
    assert main(["env", "--tables", str(file)]) == 2
    assert "tables.toml" in capsys.readouterr().err


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


def test_a_named_place_without_a_library(tmp_path, monkeypatch, capsys):
    """Another TensorRT, which may be there, is not what was asked for."""
    other = tmp_path / "libnvinfer.so.10"
    other.touch()
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    monkeypatch.setenv("TENSORRT_ROOT", "/no/such")
    assert main(["env"]) == 2
    told = "TENSORRT_ROOT: expected libnvinfer.so.N in /no/such/lib, found none"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", ["with space", "a$(touch b)", "a`b`", 'a"b', "a\\b"])
def test_what_loader_and_shell_would_take_apart(tensorrt, capsys, name):
    tensorrt(name, "libnvinfer.so.10")
    assert main(["env"]) == 2
    assert "LD_PRELOAD: expected paths without spaces" in capsys.readouterr().err
