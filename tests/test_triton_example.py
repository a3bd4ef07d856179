# SPDX-License-Identifier: Apache-2.0
"""examples/triton: its commands, word for word but for ports and where the programs lie."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import small_checkpoint
from engines import on_gpu
from triton_asking import write_engine_model
from triton_server import MARKS, make_python, needs_tensorrt_backend, serve, tensorrt_environment

from trtllm_engram.builder.prepare import prepare
from trtllm_engram.runtime import open_store

pytestmark = MARKS
ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "examples/triton/README.md"
# In an engine's place: adds the token before each to its residual streams.
TOKENS_BEFORE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(one) for one in requests]

    def answer(self, request):
        names = [tensor.name() for tensor in request.inputs()]
        tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in names}
        ids, past = (tensors[name].as_numpy()[0] for name in ("token_ids", "lookback_ids"))
        assert (tensors["positions"].as_numpy()[0] == 0).any() == (past[0] < 0)
        known = np.concatenate([past[::-1], ids])
        found = [pb_utils.Tensor("next_lookback_ids", known[None, :-3:-1])]
        for name in names:
            if name.endswith(".hidden"):
                before = known[1:-1, None, None].astype(np.float32)
                out = pb_utils.Tensor(f"{name}_out", tensors[name].as_numpy() + before)
                found.append(out)
        return pb_utils.InferenceResponse(found)
"""


def commands(section):
    """The indented lines of one of the README's two sections, those that go on joined."""
    text = re.sub(r"\\\n +", "", README.read_text().split("\n## ")[section])
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    text = "".join(blocks).replace("\n      ", " ")
    return [line.strip() for line in text.splitlines()]


class Shell:
    """Runs commands in a folder that has examples/, with the server's Python first in PATH."""

    def __init__(self, folder):
        self.folder = folder
        self.python = make_python(folder / "python")
        program = self.python / "trtllm-engram"
        words = shlex.join([sys.executable, "-m", "trtllm_engram.runtime.cli"])
        program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        program.chmod(0o755)
        (folder / "examples").symlink_to(ROOT / "examples")

    def run(self, command, server=None):
        """What it prints; the ports of a server in the place of Triton's own."""
        ports = {"localhost:8000": "http", "localhost:8001": "grpc"}
        for port, protocol in ports.items() if server else ():
            command = command.replace(port, server.urls[protocol])
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=os.environ | {"PATH": f"{self.python}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


def around_launch(lines):
    """Commands before the one that launches the server, that one, and those after it."""
    (launch,) = [place for place, line in enumerate(lines) if " tritonserver " in line]
    return lines[:launch], lines[launch], lines[launch + 1 :]


def test_every_command_runs(shell, tmp_path):
    lines = commands(0)
    assert len(lines) == 8
    before, launch, after = around_launch(lines)
    for line in before:
        printed = shell.run(line)
    wanted = launch.partition(" tritonserver ")[2].replace("models", f"{tmp_path}/models")
    assert printed.rstrip().endswith(f"tritonserver {wanted}")
    with serve(tmp_path / "models", shell.python, tmp_path / "log") as server:
        answers = [shell.run(line, server) for line in after]
    (output,) = json.loads(answers[0])["outputs"]
    assert output["shape"][2:] == [2, 24]
    by_client, by_server = answers[1:]
    assert by_client == by_server
    hashed = shell.run("trtllm-engram hash store --text examples/multilingual.txt --json")
    last = json.loads(hashed)["hash_ids"][-1][0]
    assert by_client.splitlines()[1] == f"last token, first layer: {last}"


@on_gpu
@pytest.mark.unsanitized
@needs_tensorrt_backend
def test_every_command_of_an_engine_runs(shell, tmp_path):
    lines = commands(1)
    assert len(lines) == 6
    before, launch, after = around_launch(lines)
    for line in commands(0)[:2]:  # a store
        shell.run(line)
    printed = [shell.run(line) for line in before]
    wanted = shell.run(f"echo {launch}").replace("engines", f"{tmp_path}/engines")
    assert printed[1].endswith(wanted)
    options = shlex.split(wanted)[3:]
    environment = tensorrt_environment(tmp_path / "engines/engram/tables.toml")
    with serve(
        tmp_path / "engines", shell.python, tmp_path / "log", *options, environment=environment
    ) as server:
        by_client, by_server, in_pieces = (
            shell.run(line, server) for line in [*after, f"{after[0]} --piece 17"]
        )
    assert by_client == by_server == in_pieces


def test_the_client_of_an_engine_hands_on_the_past(shell, tmp_path):
    """However a text is cut, with Python in the engine's place."""
    checkpoint = small_checkpoint(tmp_path / "checkpoint")
    prepare(checkpoint, tmp_path / "store")
    store = open_store(tmp_path / "store")
    options = ("--max-batch", "8", "--max-tokens", "512", "--hidden-dtype", "float32")
    write_engine_model(store, tmp_path / "engines", "engram", TOKENS_BEFORE, *options)
    tables = {"TRTLLM_ENGRAM_TABLES": str(tmp_path / "engines/engram/tables.toml")}
    with serve(tmp_path / "engines", shell.python, tmp_path / "log", environment=tables) as server:
        line = around_launch(commands(1))[2][0]
        found = {shell.run(f"{line} --piece {size}", server) for size in (7, 64)}
    assert len(found) == 1
