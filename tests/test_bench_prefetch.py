# SPDX-License-Identifier: Apache-2.0
"""bench prefetch: how much runs beside what, the picture of it, and on a GPU that it all runs."""

import json

import pytest

from trtllm_engram.runtime.bench import gpu, prefetch, timeline
from trtllm_engram.runtime.bench.timeline import Span
from trtllm_engram.runtime.cli import main

SPANS = {
    "prefetched": [
        Span("side stream", "lookup", 10, 900),
        Span("side stream", "lookup", 900, 1800),
        Span("main stream", "GEMM", 5, 450),
        Span("main stream", "GEMM", 450, 1000),
        Span("main stream", "projection", 1000, 1100),
    ],
    "in line": [
        Span("main stream", "GEMM", 5, 450),
        Span("main stream", "lookup", 450, 1340),
        Span("main stream", "projection", 1340, 1440),
    ],
}


@pytest.mark.parametrize(
    ("gemm_us", "lookup_us", "expected"),
    [(100, 10, (4, 28)), (100, 1000, (15, 1)), (100, 279, (4, 1)), (400, 4300, (16, 1))],
)
def test_lookups_end_before_the_gemms(gemm_us, lookup_us, expected):
    num_gemms, num_lookups = prefetch.counts(gemm_us, lookup_us)
    assert (num_gemms, num_lookups) == expected
    assert num_lookups * lookup_us <= 0.7 * num_gemms * gemm_us


def test_a_picture_of_the_streams(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    timeline.plot(tmp_path / "one.png", SPANS, "two layers")
    other = {**SPANS, "in line": SPANS["in line"][:-1]}
    timeline.plot(tmp_path / "other.png", other, "two layers")
    pictures = [(tmp_path / f"{name}.png").read_bytes() for name in ("one", "other")]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]


@pytest.mark.gpu
def test_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "_TURNS", 2)
    argv = ["bench", "prefetch", "--tokens", "1,300", "--table-gb", "0.01", "--json"]
    assert main([*argv, "--plot", str(tmp_path / "timeline.png")]) == 0
    entries = json.loads(capsys.readouterr().out)["results"]
    assert {entry["T"] for entry in entries} == {1, 300}
    assert {entry["rival"] for entry in entries} == {prefetch.ALONE, prefetch.IN_LINE}
    assert {"multi-wave GEMM, lookups as chosen", prefetch.TWO_LAYERS} <= {
        entry["row"] for entry in entries
    }
    assert (tmp_path / "timeline.png").stat().st_size > 0
