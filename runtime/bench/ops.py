# SPDX-License-Identifier: Apache-2.0
"""CPU ops against what the same cores can do: random reads, or a fixed number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trtllm_engram.plugins.errors import EngramError

from .. import _native, demo_check, ops
from ..data_files import flash_layout
from ..row import num_blocks
from .measure import Measurement, median_seconds, num_cores

TOKENS = 8192
_COLUMNS = 24
_HEAD_DIM = 256
_SCALES = num_blocks(_HEAD_DIM)
_TURNS = 9
_CHECKED_TOKENS = 64
_HASH_TOKENS = 1 << 18
_HASH_TARGET = 10e6  # (token, layer) pairs a second and core


def bench_lookup(table_bytes: int) -> list[Measurement]:
    """Random rows of a table far larger than the caches, fresh ids in every turn.

    Rows and blocks come from the same array; numpy puts one as large as that, as a host table is,
    on huge pages.
    """
    rng = np.random.default_rng(0)
    num_rows = max(1024, table_bytes // (_HEAD_DIM + _SCALES))
    values = rng.integers(0, 127, (num_rows, _HEAD_DIM), dtype=np.uint8)
    scales = rng.integers(120, 128, (num_rows, _SCALES), dtype=np.uint8)
    all_ids = rng.integers(0, num_rows, (_TURNS, TOKENS, _COLUMNS), dtype=np.int32)
    blocks = rng.integers(0, num_rows, (_TURNS, TOKENS * _COLUMNS), dtype=np.int64)
    rows = np.empty((TOKENS, _COLUMNS * _HEAD_DIM), np.uint16)
    packed = np.empty((TOKENS, _COLUMNS * (_HEAD_DIM + _SCALES)), np.uint8)
    _check_lookup(values, scales, all_ids[0, :_CHECKED_TOKENS])

    def read_blocks(turn: int) -> object:
        ids = blocks[turn]
        return _native.read_blocks(values.ctypes.data, ids.ctypes.data, ids.size, _HEAD_DIM)

    ceiling, lookup, lookup_packed = median_seconds(
        [
            read_blocks,
            lambda turn: ops.lookup(values, scales, all_ids[turn], out=rows),
            lambda turn: ops.lookup_packed(values, scales, all_ids[turn], out=packed),
        ],
        _TURNS,
    )
    count = TOKENS * _COLUMNS
    return [
        Measurement(name, count / seconds, "rows", "random reads", count / ceiling, 0.7)
        for name, seconds in (("lookup to BF16", lookup), ("lookup packed", lookup_packed))
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


def _check_lookup(
    values: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], ids: npt.NDArray[np.int32]
) -> None:
    expected = demo_check.rows(values, scales, ids).view(np.uint16)
    if not np.array_equal(ops.lookup(values, scales, ids).view(np.uint16), expected):
        raise EngramError("lookup: expected the rows of numpy's formula, found others")
