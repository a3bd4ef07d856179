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

from triton_server import MARKS, make_python, serve

pytestmark = MARKS
ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "examples/triton/README.md"


def commands():
    """The indented lines, those that go on joined."""
    text = re.sub(r"\\\n +", "", README.read_text())
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    text = "".join(blocks).replace("\n      ", " ")
    return [line.strip() for line in text.splitlines()]


def test_every_command_runs(tmp_path):
    python = make_python(tmp_path / "python")
    program = tmp_path / "python/bin/trtllm-engram"
    words = shlex.join([sys.executable, "-m", "trtllm_engram.runtime.cli"])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {"PATH": f"{python}:{os.environ['PATH']}"}

    def run(command):
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    lines = commands()
    (launch,) = [place for place, line in enumerate(lines) if " tritonserver " in line]
    assert len(lines) == 8
    for line in lines[:launch]:
        printed = run(line)
    wanted = lines[launch].partition(" tritonserver ")[2].replace("models", f"{tmp_path}/models")
    assert printed.rstrip().endswith(f"tritonserver {wanted}")
    with serve(tmp_path / "models", python, tmp_path / "log") as server:
        ports = {"localhost:8000": server.urls["http"], "localhost:8001": server.urls["grpc"]}
        answers = []
        for line in lines[launch + 1 :]:
            for port, url in ports.items():
                line = line.replace(port, url)
            answers.append(run(line))
    (output,) = json.loads(answers[0])["outputs"]
    assert output["shape"][2:] == [2, 24]
    by_client, by_server = answers[1:]
    assert by_client == by_server
    hashed = run("trtllm-engram hash store --text examples/multilingual.txt --json")
    last = json.loads(hashed)["hash_ids"][-1][0]
    assert by_client.splitlines()[1] == f"last token, first layer: {last}"
