# SPDX-License-Identifier: Apache-2.0
"""bench on a GPU: what is reported and what is refused; never how fast anything is."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from trtllm_engram.builder import EngramLayout
from trtllm_engram.builder.made_up import config_of_size
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import ops
from trtllm_engram.runtime.bench import GPU_BENCHES, gpu, lookup_text, report
from trtllm_engram.runtime.cli import main

EMPTY, ONE, TWO = (gpu.Timing(us, us - 0.1, us + 0.1) for us in (3.0, 3.9, 4.5))
CEILINGS = gpu.Ceilings(EMPTY, {1: ONE, 2: TWO}, 4.0e12, 4.1e12, 4.0e14)
ABOUT = {"machine": "a GPU", "driver": "1.2", "command": "trtllm-engram bench lookup"}


def result(row, targets=(), depth=1, **medians):
    case = gpu.Case(row, 64, 4_000_000, {}, lambda _name, _result: None, targets, depth)
    timings = {name: gpu.Timing(us, us - 0.5, us + 0.5) for name, us in medians.items()}
    return gpu.Result(case, timings, CEILINGS)


def test_rate_and_share():
    one = result("lookup", ours=2.0)
    assert one.rate == pytest.approx(2e12)
    assert one.share == pytest.approx(0.5)
    assert one.cold_reads_us == 3.9
    assert result("hash", depth=2, ours=5.0).cold_reads_us == 4.5


@pytest.mark.parametrize(
    ("target", "ours_us", "met"),
    [
        (gpu.Target("vLLM", ratio=0.5), 5.0, True),
        (gpu.Target("vLLM", ratio=0.5), 5.1, False),
        (gpu.Target(gpu.EMPTY, over_us=2.0), 12.0, True),
        (gpu.Target(gpu.EMPTY, over_us=2.0), 12.1, False),
    ],
    ids=["ratio_met", "ratio_missed", "over_met", "over_missed"],
)
def test_targets(target, ours_us, met):
    assert target.is_met(ours_us, 10.0) is met


def test_an_entry_for_each_rival_and_target():
    targets = [gpu.Target("vLLM", ratio=0.3), gpu.Target(gpu.EMPTY, over_us=2.0)]
    entries = report.entries([result("lookup", targets, ours=4.0, vLLM=10.0, SGLang=8.0)], ABOUT)
    found = {one["rival"]: (one["rival_us"], one["ratio"], one["met"]) for one in entries}
    assert found == {
        "vLLM": (10.0, 0.4, False),
        "SGLang": (8.0, 0.5, None),
        gpu.EMPTY: (3.0, 1.333, True),
    }
    assert all(one["T"] == 64 and one["machine"] == "a GPU" for one in entries)


def test_a_copy_of_as_many_bytes_is_no_rival():
    """It is the least that such a size takes, where GPU memory is the bound."""
    one = result("gate", ours=4.0, vLLM=10.0)
    (entry,) = report.entries([one], ABOUT)
    assert entry["copy_us"] is None
    (entry,) = report.entries([replace(one, copy_us=3.5)], ABOUT)
    assert (entry["copy_us"], entry["rival"]) == (3.5, "vLLM")


def test_what_products_take_at_cublas_rate():
    one = result("projection", ours=130.0)
    (entry,) = report.entries([one], ABOUT)
    assert entry["products_us"] is None
    multiplied = replace(one, case=replace(one.case, num_products=256 * 6144 * 25600))
    (entry,) = report.entries([multiplied], ABOUT)
    assert entry["products_us"] == 100.66


def test_without_rivals_there_is_no_rival_column():
    (entry,) = report.entries([result("gate", [gpu.Target("vLLM", ratio=0.75)], ours=4.0)], ABOUT)
    assert entry["rival"] is None
    assert entry["met"] is None


def test_rows_of_other_benchmarks_stay_in_the_file(tmp_path):
    path = tmp_path / "performance.json"
    report.write_entries(path, report.entries([result("gate", ours=9.0)], ABOUT))
    report.write_entries(path, report.entries([result("lookup", ours=5.0)], ABOUT))
    report.write_entries(path, report.entries([result("lookup", ours=4.0)], ABOUT))
    assert [(one["row"], one["ours_us"]) for one in json.loads(path.read_text())] == [
        ("gate", 9.0),
        ("lookup", 4.0),
    ]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"T": 1}]'])
def test_a_file_of_something_else_stays_as_it_is(tmp_path, capsys, content):
    """It is refused before anything is measured."""
    path = tmp_path / "precious.json"
    path.write_text(content)
    assert main(["bench", "lookup", "--output", str(path)]) == 2
    assert f"{path}: expected results of `bench`" in capsys.readouterr().err
    assert path.read_text() == content


def test_a_plot(tmp_path, monkeypatch):
    path = tmp_path / "plot.png"
    results = [result(row, ours=9.0, vLLM=10.0) for row in ("gate", "lookup", "hash, 2 layers")]
    report.plot(path, report.entries(results, ABOUT))
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EngramError, match=r"^--plot: expected the package matplotlib"):
        report.plot(path, report.entries(results, ABOUT))


@pytest.mark.parametrize(
    "argv",
    [
        ("ops", "--output", "o"),
        ("ops", "--tokens", "1"),
        ("gate", "--file-gb", "1"),
        ("gate", "--place", "host"),
    ],
)
def test_options_of_another_benchmark(argv, capsys):
    assert main(["bench", *argv]) == 2
    assert f"{argv[1]}: expected with the benchmarks " in capsys.readouterr().err


def test_options_of_a_table_on_disk(capsys):
    assert main(["bench", "lookup", "--place", "disk", "--output", "some.json"]) == 2
    assert "layer, gpu, lookup, prefetch, found lookup --place disk" in capsys.readouterr().err
    assert main(["bench", "hash", "--file-gb", "1"]) == 2
    assert "ops, tables, lookup --place disk, found hash" in capsys.readouterr().err


def test_paths_of_a_table_in_gpu_memory_are_not_explained(capsys):
    assert main(["bench", "lookup", "--explain"]) == 2
    assert "--explain: expected with --place host, found device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "a"], "--text: expected with --place host, found device"),
        (["--place", "host", "--hot-text", "a"], "--hot-text: expected with --text, found it with"),
        (["--place", "host", "--text", "a", "--hot-gib", "1"], "--hot-gib: expected with --hot-te"),
        (["--place", "host", "--text", "a", "--hot-adaptive", "1"], "--hot-adaptive: expected wit"),
        (["--place", "host", "--text", "a", "--explain"], "--explain: expected with random rows"),
        (["--hot-text", "a", "--hot-gib", "0"], "--hot-gib: expected 0.001 to 1e+06, found '0'"),
    ],
)
def test_texts_that_go_with_nothing(words, message, capsys):
    assert main(["bench", "lookup", *words]) == 2
    assert message in capsys.readouterr().err


def test_rows_of_texts(tmp_path):
    """Those that `tables count` would count in a store of that layout, without a store."""
    layout = EngramLayout(config_of_size(20_000_000, layers=(1,)))
    (tmp_path / "text").write_text("Rows that texts read, and that texts read again. " * 30)
    hashed = lookup_text.Hashed(layout)
    text = hashed.tokens_of(tmp_path / "text")
    rows, counts = np.unique(hashed.ids(text), return_counts=True)
    hot = hashed.hot_rows([tmp_path / "text"], 50 * 264 / 2**30)
    assert hot["row"].size == 50
    np.testing.assert_array_equal(np.sort(hot["count"]), np.sort(counts[rows >= 0])[-50:])
    with pytest.raises(InputError, match=f"expected at least {text.size + 1} tokens"):
        hashed.tokens_of(tmp_path / "text", text.size + 1)


def test_rivals_that_are_not_there(tmp_path, capsys):
    assert main(["bench", "lookup", "--rivals", str(tmp_path)]) == 2
    assert f"--rivals: {tmp_path}: expected vllm_engram.py, found none" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", ["0", "a", ""])
def test_token_counts_that_are_none(tokens, capsys):
    assert main(["bench", "lookup", "--tokens", tokens]) == 2
    assert "expected counts like 1,64,8192" in capsys.readouterr().err


def test_without_torch_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    gpu.load_torch.cache_clear()
    assert main(["bench", "lookup"]) == 2
    assert "bench: error: expected torch for a benchmark on a GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_BENCHES)
def test_every_benchmark_runs(name, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "_TURNS", 2)
    assert main(["bench", name, "--tokens", "1,130", "--table-gb", "0.01", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["results"]
    assert {entry["T"] for entry in entries} == {1, 130}
    assert all(entry["ours_us"] > 0 and entry["bytes"] > 0 for entry in entries)


@pytest.mark.gpu
@pytest.mark.parametrize("explain", [[], ["--explain"]], ids=["chosen", "explained"])
def test_a_table_in_host_memory(explain, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "_TURNS", 2)
    argv = ["bench", "lookup", "--place", "host", "--tokens", "1,300", "--table-gb", "0.01"]
    assert main([*argv, *explain, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["results"]
    assert {entry["T"] for entry in entries} == {1, 300}
    assert all(entry["ours_us"] > 0 and entry["read_ceiling_gb_s"] > 0 for entry in entries)
    assert {"direct", "sorted, 8"} <= {entry["rival"] for entry in entries} or not explain


@pytest.mark.gpu
def test_texts_and_the_rows_of_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "_TURNS", 2)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(f"Text {name}, the beginning of which is all its own. " * 200)
    monkeypatch.chdir(tmp_path)
    argv = ["bench", "lookup", "--place", "host", "--tokens", "1,600", "--table-gb", "0.01"]
    argv += ["--text", "a", "b", "--hot-text", "c", "--hot-gib", "0.01", "--hot-adaptive", "0.5"]
    assert main([*argv, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["results"]
    assert {entry["row"][-6:] for entry in entries} == {"text a", "text b"}
    assert {entry["rival"] for entry in entries} == {"no hot rows"}
    longer = [entry for entry in entries if entry["T"] == 600]
    assert all(entry["hot_share"] > 0 and entry["adaptive_share"] > 0 for entry in longer)


@pytest.mark.gpu
def test_a_wrong_result_is_not_timed(monkeypatch, capsys):
    right = ops.lookup
    monkeypatch.setattr(ops, "lookup", lambda *args, **options: right(*args, **options) * 2)
    assert main(["bench", "lookup", "--tokens", "1", "--table-gb", "0.01"]) == 1
    assert "lookup to BF16, T = 1: ours gave another result" in capsys.readouterr().err
