# SPDX-License-Identifier: Apache-2.0
"""stage_mxfp8: packed rows as operands of a block-scaled GEMM, bit for bit."""

import re

import generators
import numpy as np
import pytest
import reference
from devices import Torch, capture, on_devices

from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import ops


def check(device, packed, head_dim=256):
    found = ops.stage_mxfp8(device.put(packed), head_dim)
    for actual, wanted in zip(found, reference.stage_mxfp8(packed, head_dim), strict=True):
        bits = device.get(actual)
        assert bits.dtype == np.uint8
        np.testing.assert_array_equal(bits, wanted)


def packed_rows(num_tokens, num_columns, head_dim=256):
    rng = np.random.default_rng(num_tokens)
    shape = (num_tokens, num_columns * (head_dim + head_dim // 32))
    return rng.integers(0, 256, shape).astype(np.uint8)


@on_devices
def test_golden(device):
    arrays, _ = generators.golden("lookup")
    values, scales = ops.stage_mxfp8(device.put(arrays["packed"]))
    np.testing.assert_array_equal(device.get(values), arrays["mxfp8_values"])
    np.testing.assert_array_equal(device.get(scales), arrays["mxfp8_scales_128x4"])


@on_devices
@pytest.mark.parametrize("num_tokens", [0, 1, 31, 127, 128, 129, 401], ids="T{}".format)
def test_token_counts(device, num_tokens):
    check(device, packed_rows(num_tokens, 3))


@on_devices
@pytest.mark.parametrize("num_columns", [1, 5], ids="C{}".format)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 256], ids="D{}".format)
def test_row_sizes(device, head_dim, num_columns):
    """Also sizes whose scales do not fill tiles of four."""
    check(device, packed_rows(37, num_columns, head_dim), head_dim)


@on_devices
def test_agrees_with_lookup(device):
    """Looking up MXFP8 rows at once is looking up packed rows, then staging."""
    inputs = [device.put(array) for array in generators.table(101)]
    ids = device.put(generators.row_ids(np.random.default_rng(1), 130, 24, 101))
    staged = ops.stage_mxfp8(ops.lookup_packed(*inputs, ids))
    at_once = ops.lookup_mxfp8(*inputs, ids, scale_order="128x4")
    for one, other in zip(staged, at_once, strict=True):
        np.testing.assert_array_equal(device.get(one), device.get(other))


@on_devices
def test_out_is_overwritten(device):
    """The rows of a tile past the last token become zero whatever was there."""
    packed = packed_rows(3, 1)
    out = device.put(np.full((3, 256), 9, np.uint8)), device.put(np.full(1024, 9, np.uint8))
    ops.stage_mxfp8(device.put(packed), out=out)
    for actual, wanted in zip(out, reference.stage_mxfp8(packed, 256), strict=True):
        np.testing.assert_array_equal(device.get(actual), wanted)


@pytest.mark.parametrize(
    ("packed", "head_dim", "text"),
    [
        (packed_rows(2, 1), 250, "head_dim: expected a multiple of 32, found 250"),
        (packed_rows(2, 1), "256", "head_dim: expected an integer of 63 bits, found '256'"),
        (
            packed_rows(2, 1)[:, :263].copy(),
            256,
            "packed: expected rows of 264 bytes (head_dim 256), found 263 bytes a token",
        ),
        (
            packed_rows(2, 1).view(np.int8),
            256,
            "packed: expected uint8 [any, any], found int8 [2, 264]",
        ),
        (
            packed_rows(4, 1)[::2],
            256,
            "packed: expected a contiguous array, "
            "found shape [2, 264] with strides of [528, 1] bytes",
        ),
    ],
    ids=["head_dim", "head_dim_type", "row_bytes", "dtype", "strided"],
)
def test_refused(packed, head_dim, text):
    with pytest.raises(InputError, match=f"^stage_mxfp8: {re.escape(text)}$"):
        ops.stage_mxfp8(packed, head_dim)


def test_refused_out():
    with pytest.raises(InputError, match=r"expected a pair of arrays .*, found ndarray$"):
        ops.stage_mxfp8(packed_rows(2, 1), out=np.zeros((2, 256), np.uint8))


@pytest.mark.gpu
def test_graph_replay():
    device = Torch()
    packed = device.put(packed_rows(5, 2))
    out = device.put(np.zeros((5, 512), np.uint8)), device.put(np.zeros(2048, np.uint8))
    graph = capture(lambda: ops.stage_mxfp8(packed, out=out))
    other = packed_rows(5, 2)[::-1].copy()
    packed.copy_(device.put(other))
    graph.replay()
    for actual, wanted in zip(out, reference.stage_mxfp8(other, 256), strict=True):
        np.testing.assert_array_equal(device.get(actual), wanted)
