# SPDX-License-Identifier: Apache-2.0
"""History kv_phantom in a TensorRT engine on a GPU, over the simulated executor: what TensorRT-LLM
binds in host memory is bound there."""

from __future__ import annotations

import pytest
from engines import on_gpu
from generators import small_layout, small_token_map
from paged_feeds import paged_feeds
from paged_kv import Executor, Sizes
from reference import LOST
from test_history import ORDER

from trtllm_engram.builder import network
from trtllm_engram.runtime import ops

LAYOUT, TOKEN_MAP = small_layout(), small_token_map()
SIZES = Sizes()
NUM_LAYERS = 2  # of the decoder, after the reserved one
MOST = {"tokens": 1024, "requests": 64, "prompts": 64}


class PagedEngine:
    """An engine that is its hash node alone; `beams` of each request in generation."""

    def __init__(self, beams: int) -> None:
        from trtllm_engram.builder.engine import EngineBuilder
        from trtllm_engram.runtime.engine import Engine

        capacity = SIZES.max_blocks * SIZES.tokens_per_block
        dims = {
            "token_ids": ("int32", ("tokens",)),
            "host_kv_cache_pool_pointers": ("int64", (1, 2)),
            "host_kv_cache_pool_mapping": ("int32", (1 + NUM_LAYERS, 2)),
            "kv_cache_block_offsets": ("int32", (1, "requests", 2, SIZES.max_blocks)),
            "cache_indirection": ("int32", ("prompts", beams, capacity)),
            **dict.fromkeys(
                (
                    "sequence_length",
                    "context_lengths",
                    "host_request_types",
                    "host_context_lengths",
                ),
                ("int32", ("requests",)),
            ),
        }
        builder = EngineBuilder()
        net = builder.network
        inputs = {name: network.add_input(net, name, *one) for name, one in dims.items()}
        ids = network.paged_hash_ids(
            net,
            LAYOUT,
            TOKEN_MAP,
            inputs.pop("token_ids"),
            inputs,
            tokens_per_block=SIZES.tokens_per_block,
            slot_bytes=SIZES.slot_bytes,
        )
        network.mark_output(net, "hash_ids", ids)
        least, most = (
            {name: tuple(sizes.get(one, one) for one in shape) for name, (_, shape) in dims.items()}
            for sizes in (dict.fromkeys(MOST, 0), MOST)
        )
        builder.add_profile(least, most, most)
        self._engine = Engine(bytes(builder.serialize()))
        self._context = self._engine.cuda_engine.create_execution_context()

    def enqueue(self, feeds):
        """Row ids, and whether TensorRT took the call, which has ended."""
        import torch

        held = []
        spare = torch.zeros(16, device="cuda")  # for inputs without an element
        for name, array in feeds.items():
            tensor = torch.from_numpy(array)
            held.append(tensor.pin_memory() if name.startswith("host_") else tensor.cuda())
            assert self._context.set_input_shape(name, array.shape)
            address = held[-1].data_ptr() or spare.data_ptr()
            assert self._context.set_tensor_address(name, address)
        shape = (feeds["token_ids"].size, *LAYOUT.offsets.shape)
        out = torch.zeros(shape, dtype=torch.int32, device="cuda")
        assert self._context.set_tensor_address("hash_ids", out.data_ptr())
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        taken = self._context.execute_async_v3(stream.cuda_stream)
        torch.cuda.synchronize()
        return out.cpu().numpy(), taken

    def step(self, call, executor, pools):
        """On pools [2, ...] on the GPU, which it changes."""
        cache = paged_feeds(call, executor, NUM_LAYERS, [pool.data_ptr() for pool in pools])
        return self.enqueue({"token_ids": call.arguments["token_ids"], **cache})


def pools_on_gpu(executor):
    import torch

    return torch.from_numpy(executor.cache.pools.copy()).cuda()


@on_gpu
@pytest.mark.parametrize("beams", [1, 3])
def test_an_engine_finds_the_history(beams):
    """Row ids and pools are those of the CPU, whose row ids test_history.py holds."""
    engine, executor = PagedEngine(beams), Executor(SIZES, 4, beams)
    calls = 0
    for event in ["add", "step", "step", "add", "step", "finish"] * 25:
        if event == "add":
            executor.add()
        elif event == "finish" and executor.requests:
            executor.finish(executor.requests[0])
        elif event == "step" and (made := executor.step(3 if beams == 1 else 0)):
            call, after = made
            pools = pools_on_gpu(executor)
            past = ops.history(**call.arguments, max_ngram_size=ORDER)
            found, taken = engine.step(call, executor, pools)
            assert taken
            ids = call.arguments["token_ids"]
            assert (found == ops.hash_ids(LAYOUT, TOKEN_MAP, ids, *past)).all()
            assert (pools.cpu().numpy() == executor.cache.pools).all()
            after()
            calls += 1
    assert calls > 40
    assert min(executor.reused, executor.copied) > 0 or beams > 1


@on_gpu
def test_a_lost_slot_is_the_next_steps_error():
    engine, executor = PagedEngine(1), Executor(SIZES, 4)
    executor.add()
    while not executor.requests[0].histories:
        call, after = executor.step()
        ops.history(**call.arguments, max_ngram_size=ORDER)
        after()
    call, _ = executor.step()
    pools = pools_on_gpu(executor)
    first = executor.requests[0].blocks[0][0]
    lost = executor.cache.offset(first, 0) + 2 * SIZES.layer
    pools[int(first.secondary), lost, 0, 0] ^= 1
    found, taken = engine.step(call, executor, pools)
    assert taken
    assert (found[0] == LOST).all()
    assert not engine.step(call, executor, pools)[1]
