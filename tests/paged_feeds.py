# SPDX-License-Identifier: Apache-2.0
"""A step of paged_kv's executor as TensorRT-LLM binds it to an engine's inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from paged_kv import Call, Executor

from trtllm_engram.builder.nodes import PAGED_INPUTS


def paged_feeds(
    call: Call, executor: Executor, num_layers: int, pools: Sequence[int] | None = None
) -> dict[str, np.ndarray]:
    """PAGED_INPUTS of a cache whose first layer is the reserved one, of a decoder of num_layers.
    pools: addresses of the primary and the secondary one, if not the executor's own."""
    given, num_contexts = call.arguments, call.arguments["num_contexts"]
    if pools is None:
        pools = [pool.ctypes.data for pool in executor.cache.pools]
    types = np.arange(len(call.counts)) >= num_contexts
    beams = given["cache_indirection"]
    if beams is None:
        beams = np.zeros((len(call.counts), 1, executor.capacity), np.int32)
    mapping = [[0, executor.sizes.layer], *[[0, 0]] * num_layers]
    feeds = {
        "host_kv_cache_pool_pointers": np.array([pools], np.int64),
        "host_kv_cache_pool_mapping": np.array(mapping, np.int32),
        "kv_cache_block_offsets": given["block_offsets"][None],
        "cache_indirection": beams,
        "sequence_length": given["sequence_lengths"],
        "context_lengths": given["context_lengths"],
        "host_request_types": types.astype(np.int32),
        "host_context_lengths": given["context_lengths"],
    }
    return {name: feeds[name] for name in PAGED_INPUTS}
