# SPDX-License-Identifier: Apache-2.0
"""`bench lookup --calibrate`: what is written of the times of paths, and what goes by it."""

import json
import os
import subprocess
import sys

import pytest

from trtllm_engram.runtime.bench.calibration import DIRECT, GATHERED, SORTED, fastest_from
from trtllm_engram.runtime.cli import main

TIMES = {
    8: {DIRECT: 10.0, SORTED: 20.0, GATHERED: 30.0},
    64: {DIRECT: 30.0, SORTED: 25.0, GATHERED: 31.0},
    256: {DIRECT: 90.0, SORTED: 95.0, GATHERED: 40.0},
    1024: {DIRECT: 400.0, SORTED: 300.0, GATHERED: 200.0},
}


def test_fastest_from():
    """At every number above, too: sorted lookups were slower again at 256."""
    assert fastest_from(TIMES, SORTED, [DIRECT]) == 1024
    assert fastest_from(TIMES, GATHERED, [DIRECT, SORTED]) == 256
    assert fastest_from(TIMES, DIRECT, [SORTED, GATHERED]) is None


def test_no_threads_that_gather():
    times = {count: {DIRECT: each[DIRECT], SORTED: each[SORTED]} for count, each in TIMES.items()}
    assert fastest_from(times, GATHERED, [DIRECT, SORTED]) is None


@pytest.mark.parametrize("words", [[], ["--place", "host"]], ids=["alone", "host"])
def test_needs_every_path(words, tmp_path, capsys):
    assert main(["bench", "lookup", *words, "--calibrate", str(tmp_path / "file")]) == 2
    assert "--calibrate: expected with --explain" in capsys.readouterr().err


_WORKSPACE = """
from trtllm_engram.runtime import _native
args = _native.LookupArgs(num_tokens=64, num_columns=24, head_dim=256, ids_stride=24)
args.values_in_host = 1
print(_native.lookup_workspace(args))
"""


def workspace(calibration):
    """(Bytes that a lookup of 64 tokens in host memory sorts in, what is logged.)"""
    done = subprocess.run(
        [sys.executable, "-c", _WORKSPACE],
        env={**os.environ, "TRTLLM_ENGRAM_CALIBRATION": str(calibration)},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout), done.stderr


def test_lookups_go_by_the_file(tmp_path):
    file = tmp_path / "calibration.json"
    for sorted_tokens, sorts in ((64, True), (65, False), (None, False)):
        content = {"format_version": 1, "sorted_tokens": sorted_tokens, "gathered_tokens": None}
        file.write_text(json.dumps(content), encoding="utf-8")
        num_bytes, said = workspace(file)
        assert (num_bytes > 0, said) == (sorts, "")


def test_a_bad_file_is_told_and_left_alone(tmp_path):
    file = tmp_path / "calibration.json"
    file.write_text("{}", encoding="utf-8")
    num_bytes, said = workspace(file)
    assert num_bytes == 0
    assert said.count("\n") == 1
    assert f"TRTLLM_ENGRAM_CALIBRATION: {file}: format_version: expected 1, found none" in said


@pytest.mark.gpu
def test_what_is_written(tmp_path, capsys):
    file = tmp_path / "calibration.json"
    words = ["--explain", "--table-gb", "0.1", "--tokens", "8,512", "--calibrate", str(file)]
    assert main(["bench", "lookup", "--place", "host", *words]) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["format_version"] == 1
    assert found["sorted_tokens"] in (8, 512, None)
    assert found["gathered_tokens"] in (8, 512, None)
    assert set(found["measured_us"]) == {"8", "512"}
    _, said = workspace(file)
    assert said == ""
