# SPDX-License-Identifier: Apache-2.0
"""Comparisons: right data passes, wrong tables do not, and polygraphy sees the same."""

import argparse
import importlib.util
import itertools
import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from engines import TEXT, V4_COLUMNS, WRONG, on_gpu, small_store, wrong_store

from trtllm_engram.builder.model import ModelOptions, hidden_name, hidden_out_name, rows_name
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import ops
from trtllm_engram.runtime.cli.compare import _print
from trtllm_engram.runtime.compare import Reference, compare, make_feeds
from trtllm_engram.runtime.compare.plot import write_histogram
from trtllm_engram.runtime.compare.reference import _magnitude, packed_names
from trtllm_engram.runtime.compare.report import ULP_BINS, merge
from trtllm_engram.runtime.compare.sizes import falling
from trtllm_engram.runtime.compare.text import line

SIZES = {**V4_COLUMNS, "layers": (1, 14)}
OUT = hidden_out_name(1)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("compare"), **SIZES)


@pytest.fixture(scope="module")
def feed(store):
    return make_feeds(store, [(37, 3)], text=TEXT)[0]


@pytest.fixture(scope="module")
def outputs(store, feed):
    return Reference(store)(feed)


def by_name(comparisons):
    return {one.name: one for one in comparisons}


def changed(outputs, name, change):
    """The outputs with one of them copied and changed."""
    array = outputs[name].copy()
    return outputs | {name: change(array)}


# Feeds.


def test_feeds_are_pieces_of_the_text(store):
    """Token p of a request is the text's at its position, and lookback holds what came before."""
    from trtllm_engram.runtime.text import encode

    text = encode(store.tokenizer_json, TEXT)
    for feed in make_feeds(store, [(37, 3), (200, 8)], text=TEXT):
        assert feed["token_ids"].dtype == np.int32
        places = feed["positions"] % text.size
        np.testing.assert_array_equal(feed["token_ids"], text[places])
        bounds = feed["cu_seqlens"]
        for request, (first, end) in enumerate(itertools.pairwise(bounds)):
            if first == end:
                continue
            start = feed["positions"][first]
            np.testing.assert_array_equal(
                feed["positions"][first:end], start + np.arange(end - first)
            )
            for column, token in enumerate(feed["lookback_ids"][request]):
                place = start - 1 - column
                assert token == (text[place] if place >= 0 else -1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [(0, 1), (1, 1), (3, 9)])
def test_feeds_of_every_size_and_dtype(store, size, dtype):
    options = ModelOptions(dtype, "whole_prompt")
    (feed,) = make_feeds(store, [size], text=TEXT, options=options)
    assert "lookback_ids" not in feed
    assert feed["cu_seqlens"].shape == (size[1] + 1,)
    assert feed[hidden_name(14)].dtype.name == dtype
    assert feed[hidden_name(14)].shape == (size[0], 4, 160)
    assert set(feed["positions"][feed["cu_seqlens"][:-1][feed["cu_seqlens"][:-1] < size[0]]]) <= {0}


def test_feeds_by_seed(store):
    one, again, other = (
        make_feeds(store, [(37, 3)], text=TEXT, seed=seed)[0] for seed in (1, 1, 2)
    )
    assert all(np.array_equal(one[name], again[name]) for name in one)
    assert not np.array_equal(one["token_ids"], other["token_ids"])


@pytest.mark.parametrize("size", [(-1, 1), (1, 0)])
def test_feeds_refuse_sizes(store, size):
    with pytest.raises(InputError, match=r"^sizes: expected 0 or more tokens and 1 or more"):
        make_feeds(store, [size])


def test_feeds_refuse_a_negative_seed(store):
    with pytest.raises(InputError, match=r"^seed: expected 0 or more, found -1$"):
        make_feeds(store, [(1, 1)], seed=-1)


# Comparisons.


def test_same_outputs_pass(outputs):
    results = compare(outputs, outputs)
    assert all(one.passed for one in results)
    assert {one.name for one in results} == {
        "hash_ids",
        "next_lookback_ids",
        *(name(layer) for layer in (1, 14) for name in (rows_name, hidden_out_name)),
        *packed_names(1),
        *packed_names(14),
    }
    hidden = by_name(results)[OUT]
    assert (hidden.limit, hidden.max_ulps, hidden.count) == (3.0, 0.0, 37 * 4 * 160)
    assert hidden.histogram[0] == hidden.count


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG.keys())
def test_wrong_table_fails(store, feed, outputs, tmp_path, spoil):
    """The fingerprint is the same: only the comparison can tell."""
    row = int(outputs["hash_ids"][5, 1, 7])
    wrong = wrong_store(tmp_path, spoil, 14, row, **SIZES)
    assert wrong.manifest.fingerprint == store.manifest.fingerprint
    results = by_name(compare(Reference(wrong)(feed), outputs))
    assert not results[rows_name(14)].passed
    assert results[rows_name(14)].num_different > 0
    assert all(results[name].passed for name in ("hash_ids", rows_name(1), OUT))


def test_one_wrong_id_fails(outputs):
    def change(ids):
        ids[36, 1, 23] += 1
        return ids

    broken = by_name(compare(changed(outputs, "hash_ids", change), outputs))["hash_ids"]
    assert (broken.passed, broken.num_different, broken.max_abs) == (False, 1, 1.0)


@pytest.mark.parametrize(("ulps", "passed"), [(1, True), (3, True), (4, False)])
def test_bound_in_ulps(outputs, ulps, passed):
    """One value moved by whole BF16 ulps of its magnitude, in a stream of FP32."""
    wide = {name: outputs[name].astype(np.float32) for name in (OUT, f"{OUT}.magnitude")}
    _, exponent = np.frexp(wide[f"{OUT}.magnitude"][3, 2, 11])
    moved = changed(wide, OUT, lambda array: array)
    moved[OUT][3, 2, 11] += ulps * 2.0 ** (exponent - 8)
    (found,) = compare({OUT: moved[OUT]}, wide)
    assert found.passed == passed
    assert found.max_ulps == pytest.approx(ulps, rel=1e-3)
    assert sum(found.histogram) == found.count
    assert found.histogram[0] == found.count - 1


def test_a_value_rounded_the_other_way_passes():
    """The value's next BF16 number takes the output over a power of two: three ulps, all that is
    allowed. The one after it is a wrong value."""

    def gated(value):
        hidden = np.full((1, 1, 64), 0.01, ml_dtypes.bfloat16)
        hidden[..., 0] = 0
        kv = np.concatenate([np.ones((1, 64)), np.full((1, 64), 0.1)], axis=1)
        kv[0, 64] = value
        weights = np.full((2, 1, 64), 2.07, ml_dtypes.bfloat16)
        out = ops.gate(hidden, kv.astype(ml_dtypes.bfloat16), *weights, 1e-6)
        return {OUT: out, f"{OUT}.magnitude": _magnitude(hidden, out)}

    expected, near, wrong = map(gated, (1.0, 1.0 + 2**-7, 1.0 + 2**-6))
    assert 0.995 < expected[OUT][0, 0, 0] < 1 < near[OUT][0, 0, 0]
    results = [compare(found, expected)[0] for found in (near, wrong)]
    assert [(one.max_ulps, one.passed) for one in results] == [(3.0, True), (5.0, False)]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_number_fails(outputs, value):
    def change(array):
        array[0, 0, 0] = value
        return array

    found = by_name(compare({OUT: changed(outputs, OUT, change)[OUT]}, outputs))[OUT]
    assert not found.passed
    assert found.max_ulps == np.inf


def test_same_nan_passes():
    nan = {OUT: np.full((2, 3), np.nan, ml_dtypes.bfloat16)}
    assert compare(nan, nan)[0].passed


@pytest.mark.parametrize(
    "change", [lambda x: x[:-1], lambda x: x.astype(np.float32)], ids=["shape", "dtype"]
)
def test_another_shape_or_dtype_fails(outputs, change):
    found = by_name(compare({OUT: change(outputs[OUT])}, outputs))[OUT]
    assert not found.passed
    assert found.problem.startswith("expected bfloat16 [37, 4, 160], found ")
    assert "BROKEN: expected" in line(found)


def as_words(data):
    return data.view(np.int32)


@pytest.mark.parametrize("spoil", [None, *WRONG.values()], ids=["right", *WRONG])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize(
    "values_type", [as_words, lambda data: data.view(ml_dtypes.float8_e4m3fn)], ids=["words", "fp8"]
)
def test_packed_outputs(store, tmp_path, spoil, num_tokens, values_type):
    """Of lookup_mxfp8, as an engine gives them out: words, or values in FP8, with no tolerance."""
    (feed,) = make_feeds(store, [(num_tokens, 1)], text=TEXT)
    expected = Reference(store)(feed)
    if spoil is None or not num_tokens:
        source, wrong = expected, False
    else:
        row = int(expected["hash_ids"][0, 1, 7])
        source, wrong = Reference(wrong_store(tmp_path, spoil, 14, row, **SIZES))(feed), True
    values, *scales = packed_names(14)
    found = {name: as_words(source[name]) for name in scales} | {
        values: values_type(source[values]),
        **{hidden_out_name(layer): expected[hidden_out_name(layer)] for layer in (1, 14)},
    }
    results = by_name(compare(found, expected))
    broken = {name for name, one in results.items() if not one.passed}
    assert broken <= {values, *scales}
    assert bool(broken) == wrong
    assert not any(one.problem for one in results.values())
    assert all(results[name].limit is None for name in (values, *scales))


def test_packed_outputs_of_another_size(outputs):
    name = packed_names(1)[1]
    (found, *_) = compare({name: as_words(outputs[name])[:, :-1]}, outputs)
    assert found.problem == "expected uint8 [37, 192], found uint8 [37, 188]"


def test_unknown_output_fails(outputs):
    found = by_name(compare({"rest": outputs["hash_ids"]}, outputs))["rest"]
    assert found.problem == "the reference has no such output"


def test_a_missing_output_fails(outputs):
    """A layer's stream; row ids and rows are there for checks alone."""
    found = {OUT: outputs[OUT], "hash_ids": outputs["hash_ids"]}
    results = by_name(compare(found, outputs))
    assert [name for name, one in results.items() if not one.passed] == [hidden_out_name(14)]
    assert results[hidden_out_name(14)].problem == "missing among the outputs"
    assert len(results) == 3


def test_nothing_is_no_success(outputs):
    with pytest.raises(InputError, match=r"^compare: expected outputs, found none"):
        compare({}, outputs)


def test_merge(store, outputs):
    """Counts add up, means are weighted, the worst decides."""
    empty = Reference(store)(make_feeds(store, [(0, 1)], text=TEXT)[0])

    def change(array):
        array[0, 0, 0] = np.float32(array[0, 0, 0]) + 8
        return array

    parts = [compare(outputs, outputs), compare(empty, empty)]
    parts.append(compare(changed(outputs, OUT, change), outputs))
    merged = by_name(merge(parts))
    assert merged["hash_ids"].passed
    assert not merged[OUT].passed
    assert merged[OUT].count == 2 * outputs[OUT].size
    assert sum(merged[OUT].histogram) == merged[OUT].count
    assert merged[OUT].mean_abs == pytest.approx(8 / merged[OUT].count, rel=0.05)
    json.dumps([one.to_json() for one in merged.values()])


def test_table_of_a_comparison(outputs, capsys):
    """Means in ulps, and the histogram without its empty bins."""
    wide = {name: outputs[name].astype(np.float32) for name in (OUT, f"{OUT}.magnitude")}
    ids = {"hash_ids": outputs["hash_ids"]}
    wide |= ids

    def change(array):
        _, exponent = np.frexp(wide[f"{OUT}.magnitude"][0, 0, :2])
        array[0, 0, :2] += [2, 20] * np.ldexp(1.0, exponent - 8)
        return array

    comparisons = compare(changed(wide, OUT, change), wide)
    _print(argparse.Namespace(json=False), comparisons)
    lines = capsys.readouterr().out.splitlines()
    count = outputs[OUT].size
    assert " ".join(lines[0].split()) == (
        "output values different max mean max ulps mean ulps bound"
    )
    assert f" {22 / count:.3g} " in next(row for row in lines if row.startswith(OUT))
    shown = f"same: {count - 2}, <= 2: 1, > 16: 1"
    assert lines[-3].split() == ["output", "values", "by", "BF16", "ulps"]
    assert lines[-2].split(maxsplit=1) == [OUT, shown]
    assert lines[-1] == "rows: not compared (build --check-outputs)"
    assert line(comparisons[0]).endswith(f"bound: 3 BF16 ulps: BROKEN ({shown})")
    assert f"mean {comparisons[0].mean_abs:.3g} ({22 / count:.3g} BF16 ulps)" in line(
        comparisons[0]
    )


@pytest.mark.parametrize("named", [rows_name(1), packed_names(1)[0]])
def test_compared_rows_need_no_note(outputs, capsys, named):
    found = {name: outputs[name] for name in (OUT, hidden_out_name(14))}
    for part, is_compared in ((found, False), (found | {named: outputs[named]}, True)):
        comparisons = compare(part, outputs)
        _print(argparse.Namespace(json=False), comparisons)
        assert ("rows: not compared" in capsys.readouterr().out) != is_compared
        _print(argparse.Namespace(json=True), comparisons)
        assert json.loads(capsys.readouterr().out)["rows_compared"] == is_compared


def test_histogram_as_png(outputs, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    pictures = []
    for found in (outputs, outputs, changed(outputs, OUT, np.negative)):
        write_histogram(tmp_path / "ulps.png", compare(found, outputs))
        pictures.append((tmp_path / "ulps.png").read_bytes())
    assert pictures[0].startswith(b"\x89PNG")
    assert pictures[0] == pictures[1] != pictures[2]


def test_histograms_are_of_floats(outputs):
    lengths = {one.name: len(one.histogram) for one in compare(outputs, outputs)}
    floats = {name for name, array in outputs.items() if array.dtype == ml_dtypes.bfloat16}
    assert floats >= {OUT, rows_name(1)}
    assert lengths == {name: (len(ULP_BINS) + 1) * (name in floats) for name in lengths}


def test_png_without_matplotlib(outputs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EngramError, match=r"pip install matplotlib$"):
        write_histogram(tmp_path / "ulps.png", compare(outputs, outputs))
    with pytest.raises(InputError, match=r"^png: expected outputs of floating point"):
        write_histogram(tmp_path / "ulps.png", compare({"hash_ids": outputs["hash_ids"]}, outputs))


# polygraphy.

_POLYGRAPHY = """
import contextlib, importlib, sys
try:
    import tensorrt
except ImportError:  # bindings alone will do
    with contextlib.suppress(ImportError):
        sys.modules["tensorrt"] = importlib.import_module("tensorrt_bindings")
from polygraphy.tools import main
from trtllm_engram.runtime.compare.polygraphy_args import argument_groups
from polygraphy.tools.run import run
impl = run.Run.get_subscriptions_impl
def subscriptions(self):
    groups = impl(self)
    known = any(type(group).__name__ == "EngramReferenceArgs" for group in groups)
    return groups if known else [*groups, *argument_groups()]
run.Run.get_subscriptions_impl = subscriptions
sys.exit(main())
"""


def polygraphy(*arguments):
    """`polygraphy run`; the runner is added by hand where no entry point brings it."""
    pytest.importorskip("polygraphy", reason="the extra `polygraphy` is not installed")
    return subprocess.run(
        [sys.executable, "-c", _POLYGRAPHY, "run", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_polygraphy_reference(store, tmp_path):
    """The reference against itself, data and comparison of its own choice."""
    model = tmp_path / "unread.onnx"
    model.touch()
    options = ["--engram-store", store.path, "--engram-hidden-dtype", "float32"]
    sizes = ["--engram-sizes", "5x2", "0x1", "1x1"]
    png = tmp_path / "ulps.png"
    picture = ["--engram-png", png] if importlib.util.find_spec("matplotlib") else []
    done = polygraphy(model, "--engram-ref", "--engram-ref", *options, *sizes, *picture)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed: 3/3 iterations" in done.stdout
    assert f"{OUT}: {5 * 4 * 160} values, 0 different" in done.stdout
    assert f"bound: 3 BF16 ulps: ok (same: {5 * 4 * 160})" in done.stdout
    assert "rows: not compared" not in done.stdout
    assert not picture or png.read_bytes().startswith(b"\x89PNG")


def test_polygraphy_needs_a_store(tmp_path):
    done = polygraphy(tmp_path / "unread.onnx", "--engram-ref")
    assert done.returncode != 0
    assert "--engram-ref: expected --engram-store STORE" in done.stdout + done.stderr


def test_polygraphy_says_that_rows_were_not_compared(store, outputs, tmp_path, capsys):
    """Of an engine without check outputs; and draws all iterations in one picture."""
    pytest.importorskip("polygraphy", reason="the extra `polygraphy` is not installed")
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    from trtllm_engram.runtime.compare import polygraphy_runner as runner

    png = tmp_path / "ulps.png"
    runner.configure(str(store.path), sizes=[(37, 3)], placement="none", png=str(png))
    found = {name: outputs[name].view(np.uint16) for name in (OUT, hidden_out_name(14))}
    for _ in range(2):
        assert all(runner.compare_outputs(found, outputs).values())
        assert "rows: not compared (build --check-outputs)" in capsys.readouterr().out
    assert [len(part) for part in runner.setup().parts] == [2, 2]
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engram-ref", "--engram-store", "nowhere"], "nowhere: expected a store (with"),
        (["--engram-ref"], "BF16 in polygraphy: expected the package torch, found none"),
        ([], "--engram-ref: expected another runner, such as --trt, or --load-outputs"),
    ],
    ids=["store", "torch", "alone"],
)
def test_polygraphy_tells_in_one_line(store, tmp_path, words, said):
    """With no traceback; and no success where nothing was compared."""
    if "torch" in said and importlib.util.find_spec("torch"):
        pytest.skip("torch is installed")
    model = tmp_path / "unread.onnx"
    model.touch()
    done = polygraphy(model, "--engram-store", store.path, "--engram-ref", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("option", ["--engram-limit=-1", "--engram-limit=nan", "--engram-seed=-1"])
def test_polygraphy_refuses_numbers(tmp_path, option):
    done = polygraphy(tmp_path / "unread.onnx", "--engram-ref", option)
    assert done.returncode == 2
    assert f"{option.partition('=')[0]}: expected 0 to " in done.stderr


@pytest.mark.parametrize("size", ["5", "5x0", "x1", "-1x1"])
def test_polygraphy_refuses_sizes(tmp_path, size):
    done = polygraphy(tmp_path / "unread.onnx", "--engram-ref", f"--engram-sizes={size}")
    assert done.returncode == 2
    assert "expected TOKENSxREQUESTS, such as 37x3" in done.stderr


def test_polygraphy_refuses_sizes_that_grow(tmp_path):
    """With fewer tokens next_lookback_ids would grow, in a buffer that cannot."""
    sizes = ["--engram-store", tmp_path, "--engram-sizes", "5x8", "37x3"]
    done = polygraphy(tmp_path / "unread.onnx", "--engram-ref", *sizes)
    assert done.returncode != 0
    told = "--engram-sizes: expected no more requests in a call of fewer tokens"
    assert told in done.stdout + done.stderr
    assert "found 37x3 and 5x8: run them apart" in done.stdout + done.stderr


def test_sizes_fall():
    assert falling([(1, 1), (37, 2), (5, 2), (37, 3)]) == [(37, 3), (37, 2), (5, 2), (1, 1)]
    with pytest.raises(InputError, match=r"^sizes: expected no more requests .*2x2 and 1x3: run"):
        falling([(1, 3), (2, 2), (8, 4)])


def test_polygraphy_functions_tell_wrong_tables(store, feed, outputs, tmp_path):
    """compare_outputs takes either order, and BF16 as bits or as tensors."""
    pytest.importorskip("polygraphy", reason="the extra `polygraphy` is not installed")
    from trtllm_engram.runtime.compare import polygraphy_runner as runner

    runner.configure(str(store.path), sizes=[(37, 3)], placement="none")
    row = int(outputs["hash_ids"][5, 0, 7])
    wrong = Reference(wrong_store(tmp_path, WRONG["one byte flipped"], 1, row, **SIZES))(feed)
    found = {
        name: array.view(np.uint16) if array.dtype.itemsize == 2 else array
        for name, array in wrong.items()
        if not name.endswith(".magnitude")
    }
    more = {f"own_{index}": outputs["hash_ids"] for index in range(8)}  # than the reference has
    cases = [(found, outputs), (outputs, found), (found | more, outputs), (outputs, found | more)]
    for one, other in cases:
        results = runner.compare_outputs(one, other)
        assert not results[rows_name(1)]
        assert results[rows_name(14)]
        assert not any(results[name] for name in more if name in results)


# Engines.


@pytest.fixture(scope="module")
def plan(store):
    from trtllm_engram.builder.engine import build

    path = store.path.parent / "engine.plan"
    build(store, path, max_batch=64, max_tokens=64, options=ModelOptions(check_outputs=True))
    return path


def tables_toml(folder, stores):
    """Binds each layer to its store."""
    path = folder / "tables.toml"
    lines = ["format_version = 1"]
    for layer, store in stores.items():
        lines += [f"[tables.engram_{layer}]", f'store = "{store.path}"', f"layer = {layer}"]
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return path


with_each_wrong_table = pytest.mark.parametrize(
    "spoil", [None, *WRONG.values()], ids=["right", *WRONG]
)


def spoilt(store, folder, spoil, feed):
    """A TOML file whose layer 1 is wrong in a row that the feed reads, unless spoil is None."""
    ids = Reference(store)(feed)["hash_ids"][:, 0]
    row = int(ids[ids >= 0][7])
    first = store if spoil is None else wrong_store(folder, spoil, 1, row, **SIZES)
    return tables_toml(folder, {1: first, 14: store})


@on_gpu
@with_each_wrong_table
def test_compare_command(store, plan, feed, tmp_path, capsys, spoil):
    """An engine on the right table passes; on a wrong one, bound by a TOML file, it fails."""
    from trtllm_engram.runtime.cli import main

    toml = spoilt(store, tmp_path, spoil, feed)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    where = ["--engine", str(plan), "--tables", str(toml)]
    what = ["--text", str(text), "--sizes", "37x3"]
    code = main(["compare", str(store.path), *where, *what, "--json"])
    assert code == (0 if spoil is None else 1)
    results = {one["name"]: one for one in json.loads(capsys.readouterr().out)["outputs"]}
    assert results["hash_ids"]["passed"]
    assert results[rows_name(1)]["passed"] == (spoil is None)


@on_gpu
def test_polygraphy_with_an_engine(store, plan):
    """The command of examples/polygraphy."""
    from trtllm_engram.plugins import library_path

    options = ["--engram-store", store.path, "--plugins", library_path()]
    done = polygraphy(plan, "--trt", "--engram-ref", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed: 2/2 iterations" in done.stdout


@on_gpu
@with_each_wrong_table
def test_polygraphy_tells_wrong_tables(store, plan, tmp_path, monkeypatch, spoil):
    """The same with tables that TRTLLM_ENGRAM_TABLES binds: exit code 1 where one is wrong."""
    feed = make_feeds(store, [(37, 3), (1, 1)])[0]
    toml = spoilt(store, tmp_path, spoil, feed)
    monkeypatch.setenv("TRTLLM_ENGRAM_TABLES", str(toml))
    options = ["--engram-store", store.path, "--engram-placement", "none"]
    done = polygraphy(plan, "--trt", "--engram-ref", *options)
    assert done.returncode == (0 if spoil is None else 1), done.stdout + done.stderr
    broken = f"{rows_name(1)}: " in done.stdout and "BROKEN" in done.stdout
    assert broken == (spoil is not None)
