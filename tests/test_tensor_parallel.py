# SPDX-License-Identifier: Apache-2.0
"""A projection split by its outputs: what ranks make, side by side, is the whole bit for bit."""

import generators
import numpy as np
import pytest
from checkpoints import refusal
from devices import on_devices
from engines import bits, on_gpu, run_network

from trtllm_engram.builder import network
from trtllm_engram.builder.tensor_parallel import rank_projection
from trtllm_engram.runtime import ops

OUTPUTS, INPUTS = 192, 1536  # six blocks of scales
RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])


def operands(num_tokens):
    rng = np.random.default_rng(num_tokens)
    x = generators.bf16(rng, num_tokens, INPUTS)
    return x, *generators.fp8_weights(rng, OUTPUTS, INPUTS)


@on_devices
@RANKS
@pytest.mark.parametrize("num_tokens", [0, 1, 19, 131, 300], ids="T{}".format)
def test_parts_are_the_whole(device, num_tokens, num_ranks):
    x, weight, scale = operands(num_tokens)

    def project(weight, scale):
        return device.get(ops.project(*map(device.put, (x, weight, scale))))

    parts = [project(*rank_projection(weight, scale, r, num_ranks)) for r in range(num_ranks)]
    assert {part.shape for part in parts} == {(num_tokens, OUTPUTS // num_ranks)}
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), project(weight, scale))


@on_gpu
@RANKS
def test_engines_of_parts_are_the_whole(num_ranks):
    x, weight, scale = operands(37)

    def make(net, x):
        parts = [rank_projection(weight, scale, rank, num_ranks) for rank in range(num_ranks)]
        made = {f"rank {rank}": network.project(net, x, *part) for rank, part in enumerate(parts)}
        return {**made, "whole": network.project(net, x, weight, scale)}

    found = run_network(make, {"x": x.view("bfloat16")})
    whole = bits(found.pop("whole"))
    np.testing.assert_array_equal(np.concatenate([*map(bits, found.values())], axis=1), whole)


@pytest.mark.parametrize("num_ranks", [0, 4, 12])
def test_parts_of_whole_blocks(num_ranks):
    _, weight, scale = operands(1)
    with refusal(
        f"cuts 192 outputs into equal parts of whole scale blocks (32), found {num_ranks}"
    ):
        rank_projection(weight, scale, 0, num_ranks)


@pytest.mark.parametrize("rank", [-1, 3])
def test_no_such_rank(rank):
    _, weight, scale = operands(1)
    with refusal(f"rank: expected 0 to 2, found {rank}"):
        rank_projection(weight, scale, rank, 3)
