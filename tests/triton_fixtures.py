# SPDX-License-Identifier: Apache-2.0
"""Fixtures for `pytest_plugins = ["triton_fixtures"]`: a real tritonserver for each file."""

from __future__ import annotations

import pytest
from checkpoints import small_checkpoint
from command_line import TEXT
from safetensors.numpy import load_file
from triton_asking import write_model
from triton_server import make_python, serve

from trtllm_engram.builder.prepare import prepare
from trtllm_engram.runtime import open_store
from trtllm_engram.runtime.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def store(folder):
    """Tables of 32 MB, so that a copy too many shows."""
    prepare(small_checkpoint(folder / "checkpoint", engram_vocab_size=60_000), folder / "store")
    return open_store(folder / "store")


@pytest.fixture(scope="module")
def python(folder):
    return make_python(folder / "python")


@pytest.fixture(scope="module")
def server(request, folder, store, python):
    """With the models that the file's MODELS names, of two instances each: `engram`, and `turns`,
    which keeps sequences."""
    repository = folder / "models"
    for name in request.module.MODELS:
        options = ("--sequences",) if name == "turns" else ()
        write_model(store, repository, "--name", name, "--instances", "2", *options)
    with serve(repository, python, folder / "log", "--model-control-mode=explicit") as server:
        connection = server.connect("http")
        for name in request.module.MODELS:
            connection.load_model(name)
        yield server


@pytest.fixture(scope="module")
def expected(folder, store):
    """What `run` makes of the text."""
    (folder / "text").write_text(TEXT)
    words = ["--text", str(folder / "text"), "--output", str(folder / "out"), "--rows", "--json"]
    assert main(["run", str(store.path), *words]) == 0
    return load_file(folder / "out")
