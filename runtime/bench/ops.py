# SPDX-License-Identifier: Apache-2.0
"""CPU ops against what the same cores can do: random reads, or a fixed number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trtllm_engram.plugins.errors import EngramError

from .. import _native, demo_check, ops
from ..arrays import aligned_empty
from ..data_files import flash_layout
from ..row import num_blocks
from .measure import Measurement, median_seconds, num_cores

TOKENS = 8192
_COLUMNS = 24
_HEAD_DIM = 256
_SCALES = num_blocks(_HEAD_DIM)
_ROW_BYTES = _HEAD_DIM + _SCALES
_TURNS = 9
_CHECKED_TOKENS = 64
_FILLED_ROWS = 1 << 16  # at a time
_HASH_TOKENS = 1 << 18
_HASH_TARGET = 10e6  # (token, layer) pairs a second and core


def bench_lookup(table_bytes: int) -> list[Measurement]:
    """Random rows of a table far larger than the caches, aligned and on huge pages as a host
    table's are, beside reads of as many bytes and writes of as many as the lookup's result has.

    Each contender has its own ids in every turn: a large cache may still hold those of another.
    """
    rng = np.random.default_rng(0)
    num_rows = max(1024, table_bytes // _ROW_BYTES)
    values = _random(rng, 0, 127, (num_rows, _HEAD_DIM))
    scales = _random(rng, 120, 128, (num_rows, _SCALES))
    rows = aligned_empty((TOKENS, _COLUMNS * _HEAD_DIM), np.uint16)
    packed = aligned_empty((TOKENS, _COLUMNS * _ROW_BYTES), np.uint8)
    ids = rng.integers(0, num_rows, (_TURNS, 5, TOKENS, _COLUMNS), dtype=np.int32)
    blocks = ids.astype(np.int64)
    _check_lookup(values, scales, ids[0, 0, :_CHECKED_TOKENS])
    count = TOKENS * _COLUMNS

    def read(turn: int, contender: int, *out: int) -> object:
        some = blocks[turn, contender]
        return _native.read_blocks(values.ctypes.data, some.ctypes.data, count, _HEAD_DIM, *out)

    seconds = median_seconds(
        [
            lambda turn: read(turn, 0),
            lambda turn: read(turn, 1, rows.ctypes.data, 2 * _HEAD_DIM),
            lambda turn: read(turn, 2, packed.ctypes.data, _ROW_BYTES),
            lambda turn: ops.lookup(values, scales, ids[turn, 3], out=rows),
            lambda turn: ops.lookup_packed(values, scales, ids[turn, 4], out=packed),
        ],
        _TURNS,
    )
    reads, moves, packed_moves, to_bf16, to_packed = (count / one for one in seconds)
    return [
        Measurement(name, rate, "rows", against, ceiling, target)
        for name, rate, with_writes in (
            ("lookup to BF16", to_bf16, moves),
            ("lookup packed", to_packed, packed_moves),
        )
        for against, ceiling, target in (
            ("random reads", reads, 0.7),
            ("and writes", with_writes, None),
        )
    ]


def bench_hash() -> list[Measurement]:
    """Row ids of V4.1-Flash's two layers at true size."""
    layout = flash_layout()
    rng = np.random.default_rng(0)
    compressed = layout.config.compressed_vocab_size
    token_map = rng.integers(0, compressed, 129_280, dtype=np.int32)
    token_ids = rng.integers(0, token_map.size, _HASH_TOKENS, dtype=np.int32)
    positions = np.arange(_HASH_TOKENS, dtype=np.int64)
    bounds = np.array([0, _HASH_TOKENS], np.int32)
    out = np.empty((_HASH_TOKENS, layout.config.num_layers, _COLUMNS), np.int32)
    few = slice(0, _CHECKED_TOKENS)

    def run(_turn: int) -> object:
        return ops.hash_ids(layout, token_map, token_ids, positions, bounds, out=out)

    run(0)
    if not np.array_equal(out[few], demo_check.hash_ids(layout, token_map, token_ids[few])):
        raise EngramError("hash: expected the ids of numpy's formula, found others")
    (seconds,) = median_seconds([run], _TURNS)
    rate = _HASH_TOKENS * layout.config.num_layers / seconds / num_cores()
    return [Measurement("hash, each core", rate, "pairs", "the target", _HASH_TARGET, 1.0)]


def _random(
    rng: np.random.Generator, low: int, high: int, shape: tuple[int, ...]
) -> npt.NDArray[np.uint8]:
    array = aligned_empty(shape, np.uint8)
    for begin in range(0, shape[0], _FILLED_ROWS):
        part = array[begin : begin + _FILLED_ROWS]
        part[...] = rng.integers(low, high, part.shape, dtype=np.uint8)
    return array


def _check_lookup(
    values: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], ids: npt.NDArray[np.int32]
) -> None:
    expected = demo_check.rows(values, scales, ids).view(np.uint16)
    if not np.array_equal(ops.lookup(values, scales, ids).view(np.uint16), expected):
        raise EngramError("lookup: expected the rows of numpy's formula, found others")
