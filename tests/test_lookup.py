# SPDX-License-Identifier: Apache-2.0
"""lookup, lookup_packed and lookup_mxfp8: bit for bit the golden vectors and the definition."""

import re

import generators
import ml_dtypes
import numpy as np
import pytest
import reference
from devices import Torch, capture, on_devices, on_sliceable_devices

from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import ops

TOKENS = [1, 2, 31, 127, 129, 1009]


def mxfp8_linear(values, scales, ids, first_row=0):
    return ops.lookup_mxfp8(values, scales, ids, first_row)


def mxfp8_128x4(values, scales, ids, first_row=0):
    return ops.lookup_mxfp8(values, scales, ids, first_row, scale_order="128x4")


def reference_128x4(values, scales, ids, first_row=0):
    row_values, row_scales = reference.lookup_mxfp8(values, scales, ids, first_row)
    return row_values, reference.scales_128x4(row_scales)


FORMS = {
    "bf16": (ops.lookup, reference.lookup),
    "packed": (ops.lookup_packed, reference.lookup_packed),
    "mxfp8_linear": (mxfp8_linear, reference.lookup_mxfp8),
    "mxfp8_128x4": (mxfp8_128x4, reference_128x4),
}
every_form = pytest.mark.parametrize(("op", "twin"), FORMS.values(), ids=FORMS.keys())


def check(device, op, twin, values, scales, ids, first_row=0, given_ids=None):
    """given_ids: what the op gets where it is not put(ids)."""
    given_ids = device.put(ids) if given_ids is None else given_ids
    found = op(device.put(values), device.put(scales), given_ids, first_row)
    expected = twin(values, scales, ids, first_row)
    if not isinstance(found, tuple):
        found, expected = [found], [expected]
    for actual, wanted in zip(found, expected, strict=True):
        bits = device.get(actual)
        assert bits.dtype == wanted.dtype
        np.testing.assert_array_equal(bits, wanted)


@on_devices
def test_golden(device):
    arrays, _ = generators.golden("lookup")
    inputs = [device.put(arrays[name]) for name in ("weight", "scale", "ids")]
    np.testing.assert_array_equal(device.get(ops.lookup(*inputs)), arrays["bf16"])
    np.testing.assert_array_equal(device.get(ops.lookup_packed(*inputs)), arrays["packed"])
    values, scales = ops.lookup_mxfp8(*inputs, scale_order="128x4")
    np.testing.assert_array_equal(device.get(values), arrays["mxfp8_values"])
    np.testing.assert_array_equal(device.get(scales), arrays["mxfp8_scales_128x4"])


@on_devices
@every_form
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_token_counts(device, op, twin, num_tokens):
    values, scales = generators.table(1013)
    ids = generators.row_ids(np.random.default_rng(num_tokens), num_tokens, 3, 1013)
    check(device, op, twin, values, scales, ids)


@on_devices
@every_form
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256, 512], ids="D{}".format)
@pytest.mark.parametrize("num_columns", [1, 5, 24], ids="C{}".format)
def test_row_sizes(device, op, twin, head_dim, num_columns):
    values, scales = generators.table(211, head_dim)
    ids = generators.row_ids(np.random.default_rng(head_dim), 17, num_columns, 211)
    check(device, op, twin, values, scales, ids)


@on_devices
@every_form
def test_no_tokens(device, op, twin):
    values, scales = generators.table(7)
    check(device, op, twin, values, scales, np.zeros((0, 24), np.int32))


@on_devices
@every_form
def test_no_row_is_there(device, op, twin):
    """A shard without rows, and ids that miss every row, read as zeros, the lost id as NaN."""
    values, scales = generators.table(7)
    ids = np.array([[-1, 7], [2**31 - 1, -(2**31)]], np.int32)
    for few_or_many in (ids, np.tile(ids, (50, 1))):
        check(device, op, twin, values, scales, few_or_many)
        check(device, op, twin, values[:0], scales[:0], few_or_many)


@on_devices
def test_every_value_and_scale(device):
    """All 65536 pairs: subnormals, overflow, E8M0's smallest (2**-127) and its NaN."""
    values, scales = generators.every_pair()
    ids = np.arange(256, dtype=np.int32).reshape(32, 8)
    found = device.get(ops.lookup(*map(device.put, (values, scales, ids)))).reshape(256, 256)
    np.testing.assert_array_equal(found, reference.lookup(values, scales, ids).reshape(256, 256))
    assert (found[255] == 0x7FFF).all()
    assert (found[:, [0x7F, 0xFF]] == 0x7FFF).all()
    assert found[0, 0x38] == 0x0040  # 1.0 * 2**-127, a subnormal
    assert found[254, 0x40] == 0x7F80  # 2.0 * 2**127 overflows
    assert found[254, 0xC0] == 0xFF80
    assert found[127, 0x80] == 0x8000  # -0


@on_devices
@every_form
def test_shards(device, op, twin):
    """Rows owned by none of two shards are zeros, all others those of the whole table."""
    values, scales = generators.table(101)
    ids = generators.row_ids(np.random.default_rng(1), 23, 4, 101)
    for part in (slice(0, 37), slice(37, 101)):
        check(device, op, twin, values[part], scales[part], ids, part.start)


@on_sliceable_devices
@every_form
def test_ids_of_one_layer(device, op, twin):
    """One layer of hash_ids' result is strided."""
    values, scales = generators.table(101)
    ids = generators.row_ids(np.random.default_rng(2), 11, 3 * 5, 101).reshape(11, 3, 5)
    one_layer = device.put(ids)[:, 1]
    check(device, op, twin, values, scales, ids[:, 1], given_ids=one_layer)


@on_devices
@pytest.mark.parametrize("row", [2**23, 2**24 + 3], ids=["2GiB", "4GiB"])
def test_far_rows(device, row):
    """A row past an offset of 2 and 4 GiB: row times bytes does not fit 32 bits."""
    values = np.zeros((row + 1, 256), np.uint8)  # pages that are never written take no memory
    scales = np.zeros((row + 1, 8), np.uint8)
    near_values, near_scales = generators.table(1)
    values[row], scales[row] = near_values[0], near_scales[0]
    ids = np.array([[row, 0], [1, row]], np.int32)
    check(device, ops.lookup, reference.lookup, values, scales, ids)


@on_devices
def test_first_row_past_int32_bytes(device):
    values, scales = generators.table(50)
    ids = np.array([[384016681, 384016631, 384016682]], np.int32)
    check(device, ops.lookup, reference.lookup, values, scales, ids, 384016632)


@on_devices
def test_out(device):
    values, scales = generators.table(31)
    ids = generators.row_ids(np.random.default_rng(3), 5, 2, 31)
    inputs = [device.put(array) for array in (values, scales, ids)]
    out = device.put(np.zeros((5, 512), np.uint16))
    ops.lookup(*inputs, out=out)
    np.testing.assert_array_equal(device.get(out), reference.lookup(values, scales, ids))
    pair = (device.put(np.zeros((5, 512), np.uint8)), device.put(np.ones((5, 16), np.uint8)))
    assert ops.lookup_mxfp8(*inputs, out=pair) == pair
    for found, expected in zip(pair, reference.lookup_mxfp8(values, scales, ids), strict=True):
        np.testing.assert_array_equal(device.get(found), expected)


def test_exact_dtypes():
    """The dtypes of ml_dtypes mean the same as bytes."""
    values, scales = generators.table(31)
    ids = generators.row_ids(np.random.default_rng(4), 5, 2, 31)
    exact = values.view(ml_dtypes.float8_e4m3fn), scales.view(ml_dtypes.float8_e8m0fnu)
    rows = ops.lookup(*exact, ids)
    assert rows.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(rows.view(np.uint16), reference.lookup(values, scales, ids))
    bits = np.empty(rows.shape, np.uint16)
    assert ops.lookup(*exact, ids, out=bits) is bits
    np.testing.assert_array_equal(bits, rows.view(np.uint16))


def test_mapped_table(tmp_path):
    """A read-only mapping of a file serves as a table."""
    values, scales = generators.table(31)
    values.tofile(tmp_path / "values")
    mapped = np.memmap(tmp_path / "values", np.uint8, "r", shape=values.shape)
    ids = generators.row_ids(np.random.default_rng(5), 5, 2, 31)
    np.testing.assert_array_equal(
        ops.lookup(mapped, scales, ids).view(np.uint16), reference.lookup(values, scales, ids)
    )


VALUES, SCALES = generators.table(31)
IDS = np.zeros((5, 4), np.int32)
REFUSED = {
    "values_dtype": (
        (VALUES.view(np.int8), SCALES, IDS),
        "values: expected float8_e4m3fn or uint8 [any, any], found int8 [31, 256]",
    ),
    "values_axes": (
        (VALUES[0], SCALES, IDS),
        "values: expected float8_e4m3fn or uint8 [any, any], found uint8 [256]",
    ),
    "head_dim": (
        (VALUES[:, :100].copy(), SCALES, IDS),
        "values: last axis: expected a multiple of 32, found 100",
    ),
    "scales_shape": (
        (VALUES, SCALES[:, :7].copy(), IDS),
        "scales: expected float8_e8m0fnu or uint8 [31, 8], found uint8 [31, 7]",
    ),
    "scales_rows": (
        (VALUES, SCALES[:30], IDS),
        "scales: expected float8_e8m0fnu or uint8 [31, 8], found uint8 [30, 8]",
    ),
    "scales_fp32": (
        (VALUES, SCALES.astype(np.float32), IDS),
        "scales: expected float8_e8m0fnu or uint8 [31, 8], found float32 [31, 8]",
    ),
    "ids_dtype": (
        (VALUES, SCALES, IDS.astype(np.int64)),
        "ids: expected int32 [any, any], found int64 [5, 4]",
    ),
    "values_strided": (
        (np.zeros((31, 512), np.uint8)[:, ::2], SCALES, IDS),
        "values: expected a contiguous array, found shape [31, 256] with strides of [512, 2] bytes",
    ),
    "ids_columns_strided": (
        (VALUES, SCALES, np.zeros((5, 8), np.int32)[:, ::2]),
        "ids: expected a contiguous array, found shape [5, 4] with strides of [32, 8] bytes",
    ),
    "ids_overlap": (
        (VALUES, SCALES, np.broadcast_to(IDS[:1], (5, 4))),
        "ids: expected tokens 4 or more elements apart, found a stride of 0 bytes",
    ),
    "ids_backwards": (
        (VALUES, SCALES, IDS[::-1]),
        "ids: expected tokens 4 or more elements apart, found a stride of -16 bytes",
    ),
    "ids_none": ((VALUES, SCALES, None), "ids: expected int32 [any, any], found None"),
}


@pytest.mark.parametrize(("arrays", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(arrays, text):
    with pytest.raises(InputError, match=f"^lookup: {re.escape(text)}$"):
        ops.lookup(*arrays)


@pytest.mark.parametrize("first_row", [-1, 2**63, 1.0, None], ids=repr)
def test_refused_first_row(first_row):
    text = f"lookup: first_row: expected an integer of 63 bits, found {first_row!r}"
    with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
        ops.lookup(VALUES, SCALES, IDS, first_row)


def test_refused_out():
    with pytest.raises(InputError, match=r"out: expected bfloat16 or uint16 \[5, 1024\], found"):
        ops.lookup(VALUES, SCALES, IDS, out=np.empty((5, 1024), np.float32))
    with pytest.raises(InputError, match=r"out_scales: expected uint8 or float8_e8m0fnu \[5, 32\]"):
        ops.lookup_mxfp8(VALUES, SCALES, IDS, out=(np.empty((5, 1024), np.uint8), SCALES))
    with pytest.raises(InputError, match="out: expected a pair of arrays"):
        ops.lookup_mxfp8(VALUES, SCALES, IDS, out=SCALES)


def test_refused_scale_order():
    with pytest.raises(InputError, match="scale_order: expected linear or 128x4, found '4x128'"):
        ops.lookup_mxfp8(VALUES, SCALES, IDS, scale_order="4x128")


@pytest.mark.gpu
@every_form
def test_graph_replay(op, twin):
    """A captured lookup reads the ids of the moment."""
    device = Torch()
    values, scales = generators.table(101)
    first, second = (generators.row_ids(np.random.default_rng(seed), 13, 5, 101) for seed in (6, 7))
    inputs = [device.put(array) for array in (values, scales, first)]
    kept = []
    graph = capture(lambda: kept.append(op(*inputs)))
    inputs[2].copy_(device.put(second))
    graph.replay()
    found, expected = kept[-1], twin(values, scales, second)
    if not isinstance(found, tuple):
        found, expected = [found], [expected]
    for actual, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(device.get(actual), wanted)
