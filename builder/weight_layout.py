# SPDX-License-Identifier: Apache-2.0
"""Orders of a projection's weight bytes, of engram_weight_layout (engram.h).

row_major is FP8 [out, in], as in a checkpoint; every GPU takes it. sm90_v1 is the same bytes' bits
in the order in which the kernels of compute capability 9.0 read and decode them:

    [out/16][in/32][8 r][4 q][2 j][2 h][2 e] 16-bit places, little-endian, each with two values of
    inner value 16j + 8h + 2q + e of the 32: one of row r in bits 15 (sign) and 10-4, and one of
    row r+8 in bits 11 (sign), 14-12 and 3-0 (the other seven bits from the highest on)

It has no NaN, which the decoding does without, and takes rows by 16.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trtllm_engram.plugins.errors import InputError

ROW_MAJOR, SM90_V1 = "row_major", "sm90_v1"
LAYOUTS = (ROW_MAJOR, SM90_V1)
_ROWS, _INNER = 16, 32
_NAN = 0x7F

Bytes = npt.NDArray[np.uint8]


def lay_fastest(weight: Bytes, capability: tuple[int, int] | None) -> tuple[Bytes, str]:
    """lay_weight in the layout that is fastest on a GPU of this compute capability (None: one that
    is not known), and which that is."""
    if capability == (9, 0) and not _why_not(weight):
        return _lay_sm90(weight), SM90_V1
    return weight, ROW_MAJOR


def lay_weight(weight: Bytes, layout: str) -> Bytes:
    """A row-major weight, FP8 bytes [out, in] with in a multiple of 32, in a layout: as many bytes,
    same shape. InputError for one that the layout cannot hold."""
    if layout not in LAYOUTS:
        raise InputError(f"weight_layout: expected {' or '.join(LAYOUTS)}, found {layout!r}")
    if layout == ROW_MAJOR:
        return weight
    if problem := _why_not(weight):
        raise InputError(f"weight: {layout}: {problem}")
    return _lay_sm90(weight)


def _lay_sm90(weight: Bytes) -> Bytes:
    rows, inner = weight.shape
    # Axes R, g (rows r and r+8), r, K, j, h, q, e.
    split = weight.view(np.uint8).reshape(rows // _ROWS, 2, 8, inner // _INNER, 2, 2, 4, 2)
    high, low = np.moveaxis(split, (1, 3), (0, 2))
    places = _spread(high.transpose(0, 1, 2, 5, 3, 4, 6), low.transpose(0, 1, 2, 5, 3, 4, 6))
    return places.view(np.uint8).reshape(rows, inner)


def _spread(high: Bytes, low: Bytes) -> npt.NDArray[np.uint16]:
    """Two FP8 values to each 16-bit place."""
    high_bits = np.array([(v & 0x80) << 8 | (v & 0x7F) << 4 for v in range(256)], "<u2")
    low_bits = np.array([(v & 0x80) << 4 | (v & 0x70) << 8 | v & 0xF for v in range(256)], "<u2")
    return np.ascontiguousarray(high_bits[high] | low_bits[low])


def _why_not(weight: Bytes) -> str:
    if weight.shape[0] % _ROWS:
        return f"expected a multiple of {_ROWS} outputs, found {weight.shape[0]}"
    if (weight.view(np.uint8) & _NAN == _NAN).any():
        return "expected no NaN, found one"
    return ""
