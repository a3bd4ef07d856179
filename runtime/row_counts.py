# SPDX-License-Identifier: Apache-2.0
"""How often text reads each row of the tables: what a static set of hot rows is chosen by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder import EngramLayout

from . import ops
from .row import packed_row_bytes

_CHUNK_TOKENS = 1 << 16

#: Rows of a counted file: those of a layer side by side, the most read first.
COUNTS_DTYPE = np.dtype([("layer", "<i4"), ("row", "<i4"), ("count", "<i8")])


class RowCounts(NamedTuple):
    """A layer's rows that were read: ids int32 [N] ascending, how often int64 [N]."""

    rows: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]


class OrderShare(NamedTuple):
    """What hot rows answer of one n-gram order."""

    order: int
    reads: int
    rows: int  # that differ
    hot_reads: int
    hot_rows: int


def count_rows(
    layout: EngramLayout,
    token_map: npt.NDArray[np.int32],
    texts: Iterable[npt.NDArray[np.int32]],
) -> list[RowCounts]:
    """Of each layer, over texts of token ids int32 [T]; no n-gram spans two texts."""
    counted = [
        RowCounts(np.empty(0, np.int32), np.empty(0, np.int64)) for _ in layout.num_embeddings
    ]
    lookback = layout.config.max_ngram_size - 1
    for text in texts:
        for begin in range(0, text.size, _CHUNK_TOKENS):
            first = max(0, begin - lookback)
            tokens = text[first : begin + _CHUNK_TOKENS]
            ids = ops.hash_ids(
                layout,
                token_map,
                tokens,
                np.arange(tokens.size, dtype=np.int64),
                np.array([0, tokens.size], np.int32),
            )[begin - first :]
            for layer, before in enumerate(counted):
                counted[layer] = _add(before, ids[:, layer])
    return counted


def hot_places(counted: RowCounts, num_rows: int) -> npt.NDArray[np.int64]:
    """Places in `counted` of the rows read most, at most num_rows, the first most; of rows that
    are read as often the lower ids."""
    return np.argsort(-counted.counts, kind="stable")[:num_rows]


def shares(
    layout: EngramLayout, layer_idx: int, counted: RowCounts, hot_bytes: int
) -> list[OrderShare]:
    """By n-gram order, with as many hot rows of a layer as hot_bytes hold."""
    config = layout.config
    columns = np.searchsorted(layout.offsets[layer_idx], counted.rows, side="right") - 1
    orders = columns // config.n_heads
    is_hot = np.zeros(counted.rows.size, bool)
    is_hot[hot_places(counted, hot_bytes // packed_row_bytes(config.head_dim))] = True
    return [
        OrderShare(
            order + 2,
            int(counted.counts[orders == order].sum()),
            int((orders == order).sum()),
            int(counted.counts[(orders == order) & is_hot].sum()),
            int(((orders == order) & is_hot).sum()),
        )
        for order in range(config.max_ngram_size - 1)
    ]


def to_array(
    layout: EngramLayout, counted: list[RowCounts], hot_bytes: int
) -> npt.NDArray[np.void]:
    """The hot rows of all layers, COUNTS_DTYPE."""
    num_rows = hot_bytes // packed_row_bytes(layout.config.head_dim)
    parts = []
    for layer_id, layer in zip(layout.config.layer_ids, counted, strict=True):
        places = hot_places(layer, num_rows)
        part = np.empty(places.size, COUNTS_DTYPE)
        part["layer"] = layer_id
        part["row"] = layer.rows[places]
        part["count"] = layer.counts[places]
        parts.append(part)
    return np.concatenate(parts)


def _add(before: RowCounts, ids: npt.NDArray[np.int32]) -> RowCounts:
    read = ids[ids >= 0]
    rows, places = np.unique(np.concatenate([before.rows, read]), return_inverse=True)
    counts = np.bincount(places[before.rows.size :], minlength=rows.size).astype(np.int64)
    counts[places[: before.rows.size]] += before.counts
    return RowCounts(rows, counts)
