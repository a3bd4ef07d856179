# SPDX-License-Identifier: Apache-2.0
"""Commands that need a GPU, where there is none: what the user got wrong is told first, exit code
2; then that there is no GPU, in the same words everywhere, exit code 1."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from engines import V4_COLUMNS, small_store

from trtllm_engram.runtime import devices
from trtllm_engram.runtime.bench.gpu import load_torch
from trtllm_engram.runtime.cli import main

COMMANDS = {
    "build": ["build", "{store}", "--output", "{new}"],
    "compare": ["compare", "{store}", "--engine", "{plan}", "--png", "{new}"],
    "run": ["run", "{store}", "--engine", "{plan}", "--text", "{text}", "--output", "{new}"],
    "bench": ["bench", "lookup"],
}
# The file that is wrong, what it is instead, and what is said.
MISTAKES = [
    *(
        (name, "store", "{folder}/none", "none: expected a store")
        for name in ("build", "compare", "run")
    ),
    *(
        (name, "plan", "{folder}/none", "none: cannot read: No such file")
        for name in ("compare", "run")
    ),
    *(
        (name, "new", "{folder}/none/x", "none/x: cannot write: ")
        for name in ("build", "compare", "run")
    ),
    *(
        (name, "new", "{folder}", ": expected a file to write")
        for name in ("build", "compare", "run")
    ),
    ("run", "text", "{folder}/none", "none: cannot read: No such file"),
]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    monkeypatch.setattr(devices, "_why_library_has_none", lambda: "none here")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # bench asks for it first
    load_torch.cache_clear()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("without")
    store = small_store(folder, **V4_COLUMNS, layers=(1, 14))
    for name in ("plan", "text"):
        (folder / name).write_text("1 2 a")
    paths = {name: str(folder / name) for name in ("plan", "text", "new")}
    return {"folder": str(folder), "store": str(store.path), **paths}


def call(name, paths):
    return main([word.format(**paths) for word in COMMANDS[name]])


@pytest.mark.parametrize("name", COMMANDS)
def test_no_gpu(paths, name, capsys):
    assert call(name, paths) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(": expected a usable GPU: none here")


@pytest.mark.parametrize(("name", "which", "instead", "said"), MISTAKES)
def test_mistakes_come_first(paths, name, which, instead, said, capsys):
    assert call(name, paths | {which: instead.format(**paths)}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_compare_reads_its_tables_first(paths, tmp_path, capsys):
    arguments = [word.format(**paths) for word in COMMANDS["compare"]]
    assert main([*arguments, "--tables", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err


def test_compare_takes_one_placement(paths, tmp_path, capsys):
    """The file's or the option's: ignored, one of them would have been compared unseen."""
    arguments = [word.format(**paths) for word in COMMANDS["compare"]]
    tables = ["--tables", str(tmp_path / "none.toml")]
    assert main([*arguments, *tables, "--placement", "host"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("--placement: expected without --tables, whose file has it, found both")


def test_triton_looks_for_the_engine_first(paths, tmp_path, capsys):
    engine = ["--engine", str(tmp_path / "none"), "--model-repository", str(tmp_path / "models")]
    assert main(["triton", paths["store"], *engine]) == 2
    assert "none: cannot read: No such file" in capsys.readouterr().err
