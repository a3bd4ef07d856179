# SPDX-License-Identifier: Apache-2.0
"""Weights in the orders that kernels read: every bit is where weight_layout.py says."""

import re

import numpy as np
import pytest

from trtllm_engram.builder import nodes, weight_layout
from trtllm_engram.builder.weight_layout import lay_fastest, lay_weight
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import ops


def any_weight(rows, inner):
    """All FP8 values but NaN."""
    return (np.random.default_rng(0).integers(0, 256, (rows, inner)) & 0xFB).astype(np.uint8)


def place(value, is_high):
    if is_high:
        return (value >> 7) << 15 | (value & 0x7F) << 4
    return (value >> 7) << 11 | (value >> 4 & 7) << 12 | value & 0xF


@pytest.mark.parametrize("size", [(16, 32), (48, 96)])
def test_sm90_v1(size):
    weight = any_weight(*size)
    places = lay_weight(weight, "sm90_v1").view("<u2").reshape(-1)
    assert places.size * 2 == weight.size
    index = 0
    for first_row in range(0, size[0], 16):
        for first in range(0, size[1], 32):
            for r in range(8):
                for q in range(4):
                    for j, h, e in np.ndindex(2, 2, 2):
                        inner = first + 16 * j + 8 * h + 2 * q + e
                        high, low = (int(weight[first_row + i + r, inner]) for i in (0, 8))
                        assert places[index] == place(high, True) | place(low, False)
                        index += 1


def test_row_major_is_as_it_was():
    weight = any_weight(5, 32)
    assert lay_weight(weight, "row_major") is weight


def test_fastest():
    weight = any_weight(32, 64)
    laid, layout = lay_fastest(weight, (9, 0))
    assert layout == "sm90_v1"
    np.testing.assert_array_equal(laid, lay_weight(weight, "sm90_v1"))
    for capability in ((8, 0), (12, 0), None):
        assert lay_fastest(weight, capability) == (weight, "row_major")
    with_nan = weight.copy()
    with_nan[3, 5] = 0xFF
    for other in (weight[:24], with_nan):
        assert lay_fastest(other, (9, 0)) == (other, "row_major")


def test_a_build_looks_for_nan_once(monkeypatch):
    """In a true layer's weight that takes as long as laying it."""
    looked = []
    why_not = weight_layout._why_not
    monkeypatch.setattr(weight_layout, "_why_not", lambda w: looked.append(w) or why_not(w))
    node = nodes.fastest_project_node("x", any_weight(32, 64), np.zeros((1, 2), np.uint8), (9, 0))
    assert node.fields["weight_layout"] == "sm90_v1"
    assert len(looked) == 1


def test_refused():
    weight = any_weight(32, 64)
    for bad, layout, text in (
        (weight, "columns", "weight_layout: expected row_major or sm90_v1, found 'columns'"),
        (weight[:8], "sm90_v1", "weight: sm90_v1: expected a multiple of 16 outputs, found 8"),
        (weight | 0x7F, "sm90_v1", "weight: sm90_v1: expected no NaN, found one"),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
            lay_weight(bad, layout)


def test_refused_by_the_op():
    x, scale = np.zeros((1, 32), np.uint16), np.zeros((1, 1), np.uint8)
    for options, text in (
        ({"weight_layout": "v2"}, "weight_layout: expected one of row_major, sm90_v1, found 'v2'"),
        (
            {"weight_layout": "sm90_v1"},
            "weight_layout: expected row_major on the CPU, found another",
        ),
    ):
        with pytest.raises((EngramError, InputError), match=f"^project: {re.escape(text)}$"):
            ops.project(x, any_weight(16, 32), scale, **options)
