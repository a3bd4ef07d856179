# SPDX-License-Identifier: Apache-2.0
"""What an engine should give out: the CPU ops, straight from a store's files."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.model import hidden_name, hidden_out_name, packed_names, rows_name

from .. import ops
from ..store import Store, Table
from .feeds import Feed

Host = npt.NDArray[Any]

MAGNITUDE = ".magnitude"  # ends the name of what an output's ulps are taken of


class Reference:
    """All outputs of builder.model for one feed, those of packed_names as uint8, and the magnitudes
    that ulps are measured in.

    For hidden_out that is |hidden| + |change|, at least its root mean square over the token's copy:
    an ulp of the sum itself says little where it cancels, nor does one of a tiny summand.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def __call__(self, feed: Feed) -> dict[str, Host]:
        config = self.store.config
        num_requests = feed["cu_seqlens"].size - 1
        lookback = feed.get("lookback_ids")
        window = (num_requests, config.max_ngram_size - 1)
        next_lookback = np.full(window, -1, np.int32) if lookback is None else lookback.copy()
        ids = ops.hash_ids(
            self.store.layout,
            self.store.token_map,
            feed["token_ids"],
            feed["positions"],
            feed["cu_seqlens"],
            lookback_ids=lookback,
            next_lookback_out=next_lookback,
        )
        outputs: dict[str, Host] = {"hash_ids": ids, "next_lookback_ids": next_lookback}
        for index, layer_id in enumerate(config.layer_ids):
            table, weights = self.store.table(layer_id), self.store.weights(layer_id)
            rows = ops.lookup(table.values, table.scales, ids[:, index])
            kv = ops.project(rows, weights.wkv_weight, weights.wkv_scale)
            hidden = feed[hidden_name(layer_id)]
            out = ops.gate(hidden, kv, weights.q_weight, weights.k_weight, config.rms_norm_eps)
            outputs[rows_name(layer_id)] = rows
            packed = _packed(table, ids[:, index])
            outputs |= dict(zip(packed_names(layer_id), packed, strict=True))
            outputs[hidden_out_name(layer_id)] = out
            outputs[hidden_out_name(layer_id) + MAGNITUDE] = _magnitude(hidden, out)
        return outputs


def _packed(table: Table, ids: Host) -> tuple[Host, Host, Host]:
    values, linear = ops.lookup_mxfp8(table.values, table.scales, ids)
    _, staged = ops.lookup_mxfp8(table.values, table.scales, ids, scale_order="128x4")
    return values, linear, staged


def _magnitude(hidden: Host, out: Host) -> npt.NDArray[np.float32]:
    before, after = hidden.astype(np.float32), out.astype(np.float32)
    size = np.abs(before) + np.abs(after - before)
    mean_square = np.mean(np.square(size), axis=-1, keepdims=True)
    floor: npt.NDArray[np.float32] = np.maximum(size, np.sqrt(mean_square))
    return floor
