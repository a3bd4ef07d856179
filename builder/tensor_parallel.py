# SPDX-License-Identifier: Apache-2.0
"""The projection split among tensor-parallel ranks by its outputs, the columns of kv.

Each rank projects the same rows by its part of the weight, and the host framework gathers the parts
before the gate, which needs whole keys and values:

    weight, scale = rank_projection(weights.wkv_weight, weights.wkv_scale, rank, num_ranks)
    kv = all_gather(network.project(net, rows, weight, scale))  # side by side, by ascending rank

An output's sum is the same whatever part it is in, so kv has the same bits as in one piece.
"""

from __future__ import annotations

from trtllm_engram.builder.config import SCALE_BLOCK
from trtllm_engram.builder.nodes import Host
from trtllm_engram.plugins.errors import InputError


def rank_projection(weight: Host, scale: Host, rank: int, num_ranks: int) -> tuple[Host, Host]:
    """Of weight FP8 [out, in] and scale E8M0, one per 32x32, the rows of one of num_ranks equal
    parts: views [out / num_ranks, in] and [out / num_ranks / 32, ceil(in / 32)]."""
    num_outputs = weight.shape[0]
    if num_ranks < 1 or num_outputs % (num_ranks * SCALE_BLOCK):
        raise InputError(
            f"tensor-parallel ranks: expected a number that cuts {num_outputs} outputs into equal "
            f"parts of whole scale blocks ({SCALE_BLOCK}), found {num_ranks}"
        )
    if not 0 <= rank < num_ranks:
        raise InputError(f"rank: expected 0 to {num_ranks - 1}, found {rank}")
    count = num_outputs // num_ranks
    blocks = count // SCALE_BLOCK
    return weight[rank * count :][:count], scale[rank * blocks :][:blocks]
