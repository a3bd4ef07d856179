# SPDX-License-Identifier: Apache-2.0
"""Sizes that follow from the row format: the twin of cpp/include/engram/row.h."""

SCALE_BLOCK = 32  # values that share a scale; weights share one in blocks of 32x32
_TILE_ROWS, _TILE_SCALES = 128, 4


def num_blocks(size: int) -> int:
    return -(-size // SCALE_BLOCK)


def packed_row_bytes(head_dim: int) -> int:
    return head_dim + num_blocks(head_dim)


def staged_scale_bytes(num_rows: int, num_scales: int) -> int:
    """Bytes of a scale array [num_rows, num_scales] in F8_128x4 order, of whole tiles."""
    return -(-num_rows // _TILE_ROWS) * -(-num_scales // _TILE_SCALES) * _TILE_ROWS * _TILE_SCALES
