# SPDX-License-Identifier: Apache-2.0
"""engram_history in a simulated paged KV cache: whatever the order of events, row ids are those of
the whole history; and a block that was not copied is found."""

import numpy as np
import pytest
from devices import on_sliceable_devices
from generators import small_layout, small_token_map, table
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_kv import UNUSED_BLOCK, Executor, Sizes
from reference import LOST

from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import ops

LAYOUT, TOKEN_MAP = small_layout(), small_token_map()
ORDER = LAYOUT.primes.shape[1] + 1


def history(call):
    return ops.history(**call.arguments, max_ngram_size=ORDER)


def expected_ids(call):
    """Of each request the last tokens of its whole history."""
    parts = []
    for tokens, count in zip(call.seen, call.counts, strict=True):
        ids, bounds = np.array(tokens, np.int32), np.array([0, len(tokens)], np.int32)
        positions = np.arange(len(tokens), dtype=np.int32)
        parts.append(ops.hash_ids(LAYOUT, TOKEN_MAP, ids, positions, bounds)[-count:])
    return np.concatenate(parts)


def run(executor, events, max_drafts=0):
    """Runs events; every call must give the right row ids. Returns the number of calls."""
    calls = 0
    for event in events:
        if event == "add":
            executor.add()
        elif event == "finish" and executor.requests:
            executor.finish(executor.requests[int(executor.rng.integers(len(executor.requests)))])
        elif event in ("offload", "onboard"):
            executor.cache.move(event == "offload")
        elif event == "step" and (made := executor.step(max_drafts)):
            call, after = made
            past = history(call)
            found = ops.hash_ids(LAYOUT, TOKEN_MAP, call.arguments["token_ids"], *past)
            np.testing.assert_array_equal(found, expected_ids(call))
            after()
            calls += 1
    return calls


EVENTS = st.lists(
    st.sampled_from(["add", "add", "step", "step", "step", "finish", "offload", "onboard"]),
    min_size=30,  # fewer make hardly two calls
    max_size=80,
)
SIZES = st.builds(
    Sizes,
    tokens_per_block=st.sampled_from([1, 2, 4, 8]),
    slot_bytes=st.sampled_from([8, 12, 256]),
    layers_in_pool=st.integers(1, 3),
    layer=st.just(0),
    max_blocks=st.just(8),
    num_blocks=st.integers(6, 30),
)


@settings(max_examples=100)
@given(events=EVENTS, seed=st.integers(0, 2**32 - 1), sizes=SIZES, max_drafts=st.integers(0, 3))
def test_any_order_of_events(events, seed, sizes, max_drafts):
    """In-flight batches, chunked prompts, reuse, partial copies, offloading, eviction, drafts."""
    run(Executor(sizes, seed), events, max_drafts)


@settings(max_examples=60)
@given(events=EVENTS, seed=st.integers(0, 2**32 - 1), sizes=SIZES, beams=st.integers(2, 4))
def test_any_order_of_events_with_beams(events, seed, sizes, beams):
    run(Executor(sizes, seed, beams), events)


def test_the_simulation_does_what_it_says():
    """Long enough for every kind of event, with the reserved layer not the first of its pool."""
    executor = Executor(Sizes(), 1)
    calls = run(executor, ["add", "step", "step", "step", "finish", "offload", "onboard"] * 200, 3)
    assert calls > 300
    assert min(executor.reused, executor.copied, executor.rewound) >= 20


def test_a_block_that_was_not_copied_is_found():
    """Where partial copies are forgotten, what the new blocks held before is no history."""
    for seed in range(40):
        executor = Executor(Sizes(), seed)
        executor.copy = lambda source, target, count: None
        with pytest.raises(InputError, match="in its KV cache slot, found another: a block was"):
            run(executor, ["add", "step", "step", "finish"] * 12)


def as_a_ring(offsets, window):
    """The blocks of an attention window of so many, which begin anew after the last."""
    return np.take(offsets, np.arange(offsets.shape[2]) % window, axis=2)


def as_left_over(offsets, window):
    """Past an attention window, blocks that anybody had: here the next request's."""
    past = np.arange(offsets.shape[2]) >= window
    return np.where(past, np.roll(offsets[:, :, ::-1], 1, axis=0), offsets)


@pytest.mark.parametrize("shorten", [as_a_ring, as_left_over])
def test_an_attention_window_gives_no_wrong_row(shorten):
    """Shorter than the sequences: slots are written over. Calls have the right row ids, or fail,
    as the requests then do; whatever such requests leave is found by others as well."""
    right, failed = 0, []
    for seed in range(60):
        executor = Executor(Sizes(), seed)
        for event in ["add", "step", "step", "step", "step", "finish"] * 20:
            if event == "add":
                executor.add()
            elif event == "finish" and executor.requests:
                executor.finish(executor.requests[0])
            elif event == "step" and (made := executor.step(1)):
                call, after = made
                offsets = call.arguments["block_offsets"]
                known = np.where(offsets == UNUSED_BLOCK, offsets[:, :, :1], offsets)
                call.arguments["block_offsets"] = shorten(known, 1 + seed % 3)
                try:
                    past = history(call)
                except InputError as error:
                    failed.append(str(error))
                    while executor.requests:
                        executor.finish(executor.requests[0])
                    continue
                found = ops.hash_ids(LAYOUT, TOKEN_MAP, call.arguments["token_ids"], *past)
                np.testing.assert_array_equal(found, expected_ids(call))
                after()
                right += 1
    assert min(right, len(failed)) > 100
    assert all("in its KV cache slot, found another" in error for error in failed)


def calls_of(executor, events):
    """Calls with the pools before and after them, for another device to repeat."""
    for event in events:
        if event == "step" and (made := executor.step()):
            before = executor.cache.pools.copy()
            past = history(made[0])
            yield made[0].arguments, before, past, executor.cache.pools
            made[1]()
        elif event == "add":
            executor.add()
        elif event == "finish" and executor.requests:
            executor.finish(executor.requests[0])


@on_sliceable_devices
@pytest.mark.parametrize("beams", [1, 3])
def test_devices_agree(device, beams):
    """Bit by bit, pools too; with one layer a pool, whose arrays begin where the pool does."""
    events = ["add", "step", "step", "add", "step", "finish"] * 25
    executor = Executor(Sizes(layers_in_pool=1, layer=0), 4, beams)
    for arguments, before, past, after in calls_of(executor, events):
        pools = [device.put(pool) for pool in before]
        changed = {
            name: device.put(value) if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
        }
        changed |= {"pool": pools[0], "secondary_pool": pools[1]}
        found = ops.history(**changed, max_ngram_size=ORDER)
        for mine, theirs in zip(found, past, strict=True):
            np.testing.assert_array_equal(device.get(mine), theirs)
        for mine, theirs in zip(pools, after, strict=True):
            np.testing.assert_array_equal(device.get(mine), theirs)


@pytest.mark.gpu
def test_a_lost_slot_is_a_fault_of_the_gpu():
    """The window is lost, and rows that need it are NaN; whatever is asked next says why."""
    import torch

    executor = Executor(Sizes(layers_in_pool=1, layer=0), 4)
    executor.add()
    while not executor.requests[0].histories:
        call, after = executor.step()
        history(call)
        after()
    call, _ = executor.step()
    executor.cache.fields(executor.requests[0].blocks[0][0])[0, 0, 0] ^= 1
    changed = {
        name: torch.tensor(value, device="cuda") if isinstance(value, np.ndarray) else value
        for name, value in call.arguments.items()
    }
    past = ops.history(**changed, max_ngram_size=ORDER)
    torch.cuda.synchronize()
    with pytest.raises(EngramError, match=r"expected the check word of position [012] in"):
        ops.raise_device_fault()
    assert (past.lookback_ids == LOST).all()
    token_map = torch.tensor(TOKEN_MAP, device="cuda")
    ids = ops.hash_ids(LAYOUT, token_map, changed["token_ids"], *past)[:, 0]
    needs = past.positions - past.positions[0] < ORDER - 1
    assert torch.equal((ids == LOST).all(1), needs)
    assert needs.any()
    values, scales = (torch.tensor(part, device="cuda") for part in table(600))
    rows = ops.lookup(values, scales, ids)
    assert torch.equal(rows.isnan().all(1), needs)
    assert not rows[~needs].isnan().any()
