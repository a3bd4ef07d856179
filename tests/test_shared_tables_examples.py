# SPDX-License-Identifier: Apache-2.0
"""examples/shared_tables.py and sharded_tables.py, as users start them, and the benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from checkout import ROOT
from command_line import only_line

from trtllm_engram.runtime import cli
from trtllm_engram.runtime.holders import find_holders


@pytest.mark.multiproc
def test_the_example(tmp_path):
    """examples/shared_tables.py: every rank holds all, and survivors go on."""
    script = ROOT / "examples/shared_tables.py"
    refused = subprocess.run(
        [sys.executable, script, "--ranks", "0"], capture_output=True, text=True, check=False
    )
    assert refused.stderr.endswith("error: --ranks: expected 1 or more, found 0\n")
    words = [sys.executable, script, "--ranks", "3", "--gb", "0.01", "--kill", "1"]
    for form in ([], ["--json"]):
        done = subprocess.run(
            [*words, *form], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert (done.returncode, done.stderr) == (0, "")
        if not form:
            assert "rank 1 killed:" in done.stdout
            continue
        events = json.loads(done.stdout)
        ranks = {event: [one["rank"] for one in holders] for event, holders in events.items()}
        assert ranks == {"loaded": [0, 1, 2], "rank 1 killed": [0, 2]}
        for one in (one for holders in events.values() for one in holders):
            assert {table["memory"] for table in one["tables"].values()} == {"memfd"}
            assert sum(table["num_bytes"] for table in one["tables"].values()) > 9e6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multiproc
def test_a_rank_of_the_example_that_cannot_begin_ends_it(tmp_path):
    """Its parent knows, so nobody waits out the timeout for it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if '--rank' in sys.argv and sys.argv[sys.argv.index('--rank') + 1] == '1':\n"
        "    sys.exit('this one does not begin')\n"
    )
    script = ROOT / "examples/shared_tables.py"
    words = [sys.executable, script, "--ranks", "2", "--gb", "0.01", "--timeout", "3600"]
    paths = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 1
    assert "rank 1: expected an answer, found exit code 1" in done.stderr


def test_the_example_of_gpus_needs_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    script = ROOT / "examples/sharded_tables.py"
    paths = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        [sys.executable, script, "--ranks", "2"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 1
    assert only_line(done.stderr).startswith("sharded_tables.py: expected torch, ")


@pytest.mark.multiproc
def test_bench(tmp_path, capsys):
    """That it measures what it says and cleans up; never how fast anything is."""
    words = ["--table-gb", "0.05", "--file-gb", "0.01", "--ranks", "2", "--dir", str(tmp_path)]
    assert cli.main(["bench", "tables", *words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [one["name"] for one in figures][:3] == [
        "load, 2 ranks, warm cache",
        "memory of 2 ranks",
        "restart beside a keeper",
    ]
    # With a GPU, how long registration takes is shown apart.
    assert [one["name"] for one in figures][3:] in ([], ["  registering with the GPU"])
    assert all(one["value"] > 0 for one in figures)
    assert list(tmp_path.iterdir()) == []
    assert [one for one in find_holders() if one.name.startswith("bench-")] == []
