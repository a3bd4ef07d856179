# SPDX-License-Identifier: Apache-2.0
"""Comparisons: right outputs pass, those of wrong tables do not."""

import json

import ml_dtypes
import numpy as np
import pytest
from compare_cases import OUT, SIZES, by_name, changed
from engines import TEXT, WRONG, wrong_store

from trtllm_engram.builder.model import hidden_out_name, packed_names, rows_name
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import ops
from trtllm_engram.runtime.compare import Reference, compare, make_feeds
from trtllm_engram.runtime.compare.reference import _magnitude
from trtllm_engram.runtime.compare.report import layers_without_rows, merge, require_rows
from trtllm_engram.runtime.compare.text import line

pytest_plugins = "engine_fixtures"


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


@pytest.mark.parametrize(
    ("of_1", "of_14", "missing"),
    [
        ([], [], [1, 14]),
        ([rows_name(1)], [], [14]),
        ([packed_names(1)[0]], [rows_name(14)], [1]),
        ([packed_names(1)[1]], [rows_name(14)], [1]),
        ([rows_name(1)], packed_names(14)[:2], []),
        (packed_names(1)[::2], [rows_name(14)], []),
    ],
    ids=["none", "of a layer", "no scales", "no values", "linear", "128x4"],
)
def test_proof_needs_rows_of_every_layer(outputs, of_1, of_14, missing):
    names = {*of_1, *of_14, *map(hidden_out_name, (1, 14)), "hash_ids"}
    assert layers_without_rows(names) == missing
    if not missing:
        require_rows(names, "--hidden-only")
        return
    of = ", ".join(map(str, missing))
    said = rf"^outputs: expected rows of every layer .*check-outputs\), found none of layer {of}, "
    with pytest.raises(InputError, match=said + r".*; --hidden-only compares those alone$"):
        require_rows(names, "--hidden-only")
