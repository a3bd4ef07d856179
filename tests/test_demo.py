# SPDX-License-Identifier: Apache-2.0
"""The demo: its checks can fail, its screen is the one of snapshots/demo.txt and fits 80x24."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkout import ROOT
from rich.console import Console

from trtllm_engram.runtime import demo, demo_check, ops
from trtllm_engram.runtime.cli import demo as demo_command
from trtllm_engram.runtime.cli import main
from trtllm_engram.runtime.data_files import golden_hash, multilingual_text

SNAPSHOTS = Path(__file__).parent / "snapshots"
SMALL = {"engram_vocab_size": 500, "hidden_size": 64}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "why_no_gpu", lambda: "no CUDA driver")
        return demo.run_demo(tmp_path_factory.mktemp("demo"), lambda _: None, **SMALL)


def screen(report, kept=None):
    out = io.StringIO()
    demo_command.print_report(report, 12.3, kept, Console(file=out, width=10_000))
    return out.getvalue()


def masked(text):
    """Numbers as #, runs of spaces as one: neither times nor their widths matter."""
    return re.sub(
        r" {2,}", "  ", re.sub(r"\d+(\.\d+)?( [mun]?(?=s\b)| [kMGT](?=B| |FLOP))?", "#", text)
    )


def with_gpu(report):
    timed = [
        replace(check, timings=check.timings | {"cuda:0": check.timings["cpu"]})
        if check.timings
        else check
        for check in report.checks
    ]
    return replace(report, checks=timed, not_run={"TensorRT": "none is installed"})


def test_a_small_model_passes(report):
    assert report.passed
    assert [check.step.strip() for check in report.checks] == [
        "hash",
        f"in chunks of {demo._CHUNK}",
        "at true size",
        "lookup",
        "project",
        "gate",
        *([] if "TensorRT" in report.not_run else ["TensorRT engine"]),
    ]
    assert report.num_tokens > 400
    assert report.num_unique_rows < report.num_rows == report.num_tokens * 48


@pytest.mark.parametrize("variant", ["cpu", "gpu", "failed"])
def test_the_screen_is_the_snapshot(report, variant):
    fixed = replace(report, not_run={"GPU": "no CUDA driver", "TensorRT": "none is installed"})
    if variant == "gpu":
        fixed = with_gpu(report)
    if variant == "failed":
        fixed = replace(fixed, checks=[replace(fixed.checks[0], error=3), *fixed.checks[1:]])
    assert masked(screen(fixed)) == (SNAPSHOTS / f"demo_{variant}.txt").read_text()


@pytest.mark.parametrize("make", [lambda report: report, with_gpu], ids=["cpu", "gpu"])
def test_the_screen_fits_80_by_24(report, make):
    lines = screen(make(report), kept=Path("engram-demo")).splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []


def test_the_examples_are_there():
    for name in demo_command._EXAMPLES.split(", "):
        assert (ROOT / "examples" / name).exists()


@pytest.mark.parametrize(
    ("op", "spoil", "step"),
    [
        ("hash_ids", lambda ids: np.where(ids == ids.max(), 0, ids), "hash"),
        ("lookup", lambda rows: -rows, "lookup"),
        (
            "project",
            lambda kv: (kv.astype(np.float32) * 1.01).astype(ml_dtypes.bfloat16),
            "project",
        ),
        ("gate", lambda out: (out.astype(np.float32) * 1.01).astype(ml_dtypes.bfloat16), "gate"),
    ],
)
def test_a_wrong_op_fails_its_check(monkeypatch, tmp_path, op, spoil, step):
    monkeypatch.setattr(demo, "why_no_gpu", lambda: "no CUDA driver")
    right = getattr(ops, op)
    monkeypatch.setattr(ops, op, lambda *args, **options: spoil(right(*args, **options)))
    report = demo.run_demo(tmp_path, lambda _: None, **SMALL)
    assert step in [check.step for check in report.checks if not check.passed]
    assert "FAILED: " in screen(report)


def test_nan_is_an_infinite_error():
    nan = np.array([np.nan], np.float32)
    assert demo_check.max_ulps(nan, np.ones(1, np.float32), np.ones(1)) == float("inf")


def test_the_golden_slice_is_the_golden_vectors():
    golden = golden_hash()
    whole = np.load(Path(__file__).parent / "golden/hash_full.npz")
    begin, end = whole["fresh.cu_seqlens"][1:3]
    assert golden["token_ids"] == whole["fresh.token_ids"][begin:end].tolist()
    assert golden["hash_ids"] == whole["fresh.hash_ids"][begin:end].tolist()


def test_the_example_text_is_the_demos():
    example = Path(__file__).parents[1] / "examples/multilingual.txt"
    assert example.read_text(encoding="utf-8") == multilingual_text()


def test_exit_code_json_and_kept_files(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        demo_command, "run_demo", lambda folder, note: demo.run_demo(folder, note, **SMALL)
    )
    assert main(["demo", "--keep", str(tmp_path / "kept"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is True
    assert (tmp_path / "kept/store/engram.json").exists()
    assert main(["demo", "--keep", str(tmp_path / "kept")]) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err


def test_an_interrupted_demo_leaves_nothing(monkeypatch, tmp_path):
    def interrupted(folder, _note):
        demo.run_demo(folder, lambda _: None, **SMALL)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_command, "run_demo", interrupted)
    assert main(["demo", "--keep", str(tmp_path / "a/kept")]) == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_the_gpu_passes_the_same_checks(tmp_path):
    report = demo.run_demo(tmp_path, lambda _: None, **SMALL)
    assert report.passed
    assert all("cuda:0" in check.timings for check in report.checks if check.timings)
    assert "GPU" not in report.not_run


@pytest.mark.slow
def test_the_demo_at_its_own_size(capsys):
    assert main(["demo"]) == 0
    assert "checks passed" in capsys.readouterr().out
