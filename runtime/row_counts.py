# SPDX-License-Identifier: Apache-2.0
"""How often text reads each row of the tables: what a static set of hot rows is chosen by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder import EngramLayout

from . import ops
from .row import packed_row_bytes

_CHUNK_TOKENS = 1 << 16
_MOST_READS = np.iinfo(np.uint32).max
_PENDING_TOKENS = 1 << 22  # what they are counted of at once: that walks through all of a table

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
    """Of each layer, over texts of token ids int32 [T]; no n-gram spans two texts. Counts end at
    2**32 - 1. Takes 4 bytes of memory for each row of the tables meanwhile, and 4 for each row id
    of 4 million tokens, those of all layers and columns."""
    counts = [np.zeros(num_rows, np.uint32) for num_rows in layout.num_embeddings]
    lookback = layout.config.max_ngram_size - 1
    pending: list[npt.NDArray[np.int32]] = []
    num_pending = 0
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
            pending.append(ids)
            num_pending += len(ids)
            if num_pending >= _PENDING_TOKENS:
                _add(layout, counts, pending)
                pending, num_pending = [], 0
    if pending:
        _add(layout, counts, pending)
    return [_of_counts(layer) for layer in counts]


def hot_places(
    layout: EngramLayout, layer_idx: int, counted: RowCounts, budgets: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Places in `counted` of the rows read most, the first most; of rows that are read as often
    the lower ids. budgets: bytes that they may take, of all n-gram orders together or of each."""
    num_rows = [num_bytes // packed_row_bytes(layout.config.head_dim) for num_bytes in budgets]
    if len(num_rows) == 1:
        return _most_read(counted.counts, num_rows[0])
    orders = _orders(layout, layer_idx, counted)
    of_orders = []
    for order, limit in enumerate(num_rows):
        places = np.flatnonzero(orders == order)
        of_orders.append(places[_most_read(counted.counts[places], limit)])
    every = np.sort(np.concatenate(of_orders))
    return every[_most_read(counted.counts[every], every.size)]


def shares(
    layout: EngramLayout, layer_idx: int, counted: RowCounts, budgets: Sequence[int]
) -> list[OrderShare]:
    """By n-gram order, with as many hot rows of a layer as the budgets of hot_places hold."""
    orders = _orders(layout, layer_idx, counted)
    is_hot = np.zeros(counted.rows.size, bool)
    is_hot[hot_places(layout, layer_idx, counted, budgets)] = True
    return [
        OrderShare(
            order + 2,
            int(counted.counts[orders == order].sum()),
            int((orders == order).sum()),
            int(counted.counts[(orders == order) & is_hot].sum()),
            int(((orders == order) & is_hot).sum()),
        )
        for order in range(layout.config.max_ngram_size - 1)
    ]


def to_array(
    layout: EngramLayout, counted: list[RowCounts], budgets: Sequence[int]
) -> npt.NDArray[np.void]:
    """The hot rows of all layers, COUNTS_DTYPE."""
    parts = []
    for layer_idx, layer_id in enumerate(layout.config.layer_ids):
        layer = counted[layer_idx]
        places = hot_places(layout, layer_idx, layer, budgets)
        part = np.empty(places.size, COUNTS_DTYPE)
        part["layer"] = layer_id
        part["row"] = layer.rows[places]
        part["count"] = layer.counts[places]
        parts.append(part)
    return np.concatenate(parts)


def _most_read(counts: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.int64]:
    """Places of the highest counts, the first of equal ones; fewer are sorted than there are."""
    if limit == 0:
        return np.empty(0, np.int64)
    least = np.partition(counts, -limit)[-limit] if limit < counts.size else 0
    places = np.flatnonzero(counts >= least)
    return places[np.argsort(-counts[places], kind="stable")[:limit]]


def _orders(layout: EngramLayout, layer_idx: int, counted: RowCounts) -> npt.NDArray[np.int64]:
    """Of each counted row, 0 for n-grams of two tokens."""
    columns = np.searchsorted(layout.offsets[layer_idx], counted.rows, side="right") - 1
    orders: npt.NDArray[np.int64] = columns // layout.config.n_heads
    return orders


def _add(
    layout: EngramLayout,
    counts: list[npt.NDArray[np.uint32]],
    ids: list[npt.NDArray[np.int32]],
) -> None:
    """ids [T, L, C], column by column: each has rows of its own, side by side."""
    for layer_idx, layer in enumerate(counts):
        primes = layout.primes[layer_idx].ravel()
        for column, (offset, num_rows) in enumerate(
            zip(layout.offsets[layer_idx], primes, strict=True)
        ):
            rows = np.concatenate([part[:, layer_idx, column] for part in ids])
            read = np.bincount(rows[rows >= 0] - offset, minlength=num_rows)
            part = layer[offset : offset + num_rows]
            np.minimum(part + read, _MOST_READS, out=part, casting="unsafe")


def _of_counts(counts: npt.NDArray[np.uint32]) -> RowCounts:
    rows = np.flatnonzero(counts)
    return RowCounts(rows.astype(np.int32), counts[rows].astype(np.int64))
