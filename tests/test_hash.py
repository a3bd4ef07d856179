# SPDX-License-Identifier: Apache-2.0
"""hash_ids: the golden vectors, the definition on random inputs, chunks, and what it refuses."""

import dataclasses
import re

import generators
import numpy as np
import pytest
import reference
from devices import Torch, capture, on_devices
from generators import HASH_INPUTS, VOCAB_SIZE, small_layout, small_token_map
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import ops

CASES = ("fresh", "decode", "chunk", "dead")


def run(device, layout, token_map, tokens, **options):
    arrays = {name: getattr(tokens, name) for name in HASH_INPUTS}
    given_arrays = {name: None if a is None else device.put(a) for name, a in arrays.items()}
    ids = ops.hash_ids(layout, device.put(token_map), **given_arrays, **options)
    return device.get(ids)


def run_small(device, tokens, **options):
    layout = small_layout(max_ngram_size=tokens_window(tokens) + 1)
    return run(device, layout, small_token_map(), tokens, **options)


def tokens_window(tokens):
    return 3 if tokens.lookback_ids is None else tokens.lookback_ids.shape[1]


def expected(tokens):
    layout = small_layout(max_ngram_size=tokens_window(tokens) + 1)
    return reference.hash_ids(layout, small_token_map(), tokens)


@on_devices
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["hash_full", "hash_tiny"])
def test_golden(device, name, case):
    arrays, _ = generators.golden(name)
    tokens = reference.Tokens(**{key: arrays[f"{case}.{key}"] for key in HASH_INPUTS})
    ids = run(device, generators.golden_layout(name), generators.golden_token_map(), tokens)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, arrays[f"{case}.hash_ids"])


@on_devices
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    window=st.integers(1, 7),
    lookback=st.booleans(),
    dead=st.sampled_from([0.0, 0.2]),
    lost=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=60)
def test_definition(device, seed, lengths, window, lookback, dead, lost):
    rng = np.random.default_rng(seed)
    tokens = generators.tokens(rng, lengths, window, lookback, dead, lost=lost)
    layout = small_layout(max_ngram_size=window + 1)
    following = device.put(np.empty((len(lengths), window), np.int32))
    ids = run(device, layout, small_token_map(), tokens, next_lookback_out=following)
    np.testing.assert_array_equal(ids, reference.hash_ids(layout, small_token_map(), tokens))
    np.testing.assert_array_equal(device.get(following), reference.next_lookback(tokens, window))


@on_devices
@pytest.mark.parametrize("num_tokens", [1, 31, 257, 4099])
def test_one_request(device, num_tokens):
    tokens = generators.tokens(np.random.default_rng(num_tokens), [num_tokens])
    np.testing.assert_array_equal(run_small(device, tokens), expected(tokens))


@on_devices
def test_many_requests(device):
    rng = np.random.default_rng(1)
    tokens = generators.tokens(rng, rng.integers(0, 4, 1009).tolist(), dead=0.1)
    np.testing.assert_array_equal(run_small(device, tokens), expected(tokens))


@on_devices
@pytest.mark.parametrize("layers", [1, 3], ids="{}layers".format)
@pytest.mark.parametrize("heads", [1, 8], ids="{}heads".format)
def test_shapes(device, layers, heads):
    layout = small_layout(n_heads=heads, num_layers=layers)
    tokens = generators.tokens(np.random.default_rng(2), [5, 13])
    ids = run(device, layout, small_token_map(), tokens)
    assert ids.shape == (18, layers, 3 * heads)
    np.testing.assert_array_equal(ids, reference.hash_ids(layout, small_token_map(), tokens))


@on_devices
def test_one_token_per_request(device):
    """Without cu_seqlens each token is a request."""
    tokens = generators.tokens(np.random.default_rng(3), [1] * 7, dead=0.2)
    decode = dataclasses.replace(tokens, cu_seqlens=None)
    np.testing.assert_array_equal(run_small(device, decode), expected(tokens))


@on_devices
def test_int32_positions(device):
    tokens = generators.tokens(np.random.default_rng(4), [5, 3])
    narrow = dataclasses.replace(tokens, positions=tokens.positions.astype(np.int32))
    np.testing.assert_array_equal(run_small(device, narrow), expected(tokens))


@on_devices
def test_uint8_masks(device):
    tokens = generators.tokens(np.random.default_rng(5), [6, 6], dead=0.4)
    bytes_of = {
        name: getattr(tokens, name).astype(np.uint8) for name in ("lookback_dead", "dead_mask")
    }
    as_bytes = dataclasses.replace(tokens, **bytes_of)
    np.testing.assert_array_equal(run_small(device, as_bytes), expected(tokens))


@on_devices
def test_no_tokens(device):
    tokens = generators.tokens(np.random.default_rng(6), [0, 0])
    assert run_small(device, tokens).shape == (0, 2, 6)


@on_devices
def test_dead_ids_are_not_read(device):
    """Ids that stand for images may lie outside the vocabulary."""
    tokens = generators.tokens(np.random.default_rng(9), [7], dead=0.5)
    image_ids = np.where(tokens.dead_mask, VOCAB_SIZE + 5, tokens.token_ids).astype(np.int32)
    image_lookback = np.where(tokens.lookback_dead, VOCAB_SIZE, tokens.lookback_ids)
    images = dataclasses.replace(
        tokens, token_ids=image_ids, lookback_ids=image_lookback.astype(np.int32)
    )
    assert tokens.dead_mask.any()
    np.testing.assert_array_equal(run_small(device, images), expected(tokens))


@on_devices
def test_a_lost_id(device):
    """The tokens whose n-grams reach it have its id for rows; those after them are as ever."""
    tokens = generators.tokens(np.random.default_rng(16), [6, 2])
    lookback = np.full((2, 3), 5, np.int32)
    lookback[0, 1] = reference.LOST
    tokens = dataclasses.replace(
        tokens, positions=np.arange(8) + 9, lookback_ids=lookback, lookback_dead=None
    )
    ids = run_small(device, tokens)
    np.testing.assert_array_equal(ids, expected(tokens))
    assert (ids == reference.LOST).all(axis=(1, 2)).tolist() == [True] * 2 + [False] * 6
    assert (ids[2:] >= 0).all()


@on_devices
def test_out(device):
    tokens = generators.tokens(np.random.default_rng(7), [4])
    out = device.put(np.zeros((4, 2, 6), np.int32))
    run_small(device, tokens, out=out)
    np.testing.assert_array_equal(device.get(out), expected(tokens))


def dead_window(dead, end, window):
    """lookback_dead of a chunk that begins at `end`, nearest first."""
    before = dead[max(end - window, 0) : end][::-1]
    return np.concatenate([before, np.zeros(window - len(before), bool)])[None]


@on_devices
@pytest.mark.parametrize("dead", [0.0, 0.15], ids=["alive", "dead"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 40], ids="chunk{}".format)
def test_chunks(device, chunk, dead):
    """A text in chunks, each with the window that the last one wrote, has the ids of one piece."""
    window = 3
    tokens = generators.tokens(
        np.random.default_rng(8), [41], lookback=False, dead=dead, start=False
    )
    whole = run_small(device, tokens)
    lookback = np.full((1, window), -1, np.int32)
    pieces = []
    for first in range(0, 41, chunk):
        part = slice(first, first + chunk)
        piece = reference.Tokens(
            token_ids=tokens.token_ids[part],
            positions=tokens.positions[part],
            cu_seqlens=np.array([0, len(tokens.token_ids[part])], np.int32),
            lookback_ids=lookback,
            lookback_dead=dead_window(tokens.dead_mask, first, window),
            dead_mask=tokens.dead_mask[part],
        )
        following = device.put(np.empty((1, window), np.int32))
        pieces.append(run_small(device, piece, next_lookback_out=following))
        lookback = device.get(following)
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@on_devices
def test_dead_token_ends_ngrams(device):
    """A token in front of a dead one does not matter."""
    tokens = generators.tokens(np.random.default_rng(9), [6], lookback=False, start=False)
    dead = dataclasses.replace(tokens, dead_mask=np.arange(6) == 2)
    other = dataclasses.replace(dead, token_ids=np.where(np.arange(6) < 3, 5, dead.token_ids))
    with_any = run_small(device, dead)
    assert np.array_equal(with_any[3:], run_small(device, other)[3:])
    assert not np.array_equal(with_any[3:], run_small(device, tokens)[3:])


def broken(**changes):
    tokens = generators.tokens(np.random.default_rng(10), [3, 4])
    return dataclasses.replace(tokens, **changes)


def changed(name, place, value):
    array = getattr(broken(), name).copy()
    array[place] = value
    return broken(**{name: array})


REFUSED = {
    "id_too_large": (
        changed("token_ids", 5, VOCAB_SIZE),
        f"token_ids[5]: expected 0 to {VOCAB_SIZE - 1}, got {VOCAB_SIZE}",
    ),
    "id_negative": (changed("token_ids", 0, -1), "token_ids[0]: expected 0 to 100, got -1"),
    "lookback_id": (
        changed("lookback_ids", (1, 2), 1000),
        "lookback_ids[5]: expected -1 to 100, got 1000",
    ),
    "boundaries_fall": (
        broken(cu_seqlens=np.array([0, 5, 3, 7], np.int32), lookback_ids=None, lookback_dead=None),
        "cu_seqlens[2]: expected 5 or more, as the boundary before it, got 3",
    ),
    "boundaries_short": (
        changed("cu_seqlens", 2, 6),
        "cu_seqlens[2]: expected 7, the number of tokens, got 6",
    ),
    "boundaries_start": (changed("cu_seqlens", 0, 1), "cu_seqlens[0]: expected 0, got 1"),
    "positions_shape": (
        broken(positions=np.zeros(6, np.int64)),
        "positions: expected int64 or int32 [7], found int64 [6]",
    ),
    "positions_dtype": (
        broken(positions=np.zeros(7, np.float32)),
        "positions: expected int64 or int32 [7], found float32 [7]",
    ),
    "ids_dtype": (
        broken(token_ids=np.zeros(7, np.int64)),
        "token_ids: expected int32 [any], found int64 [7]",
    ),
    "lookback_window": (
        broken(lookback_ids=np.zeros((2, 2), np.int32), lookback_dead=None),
        "lookback_ids: expected int32 [2, 3], found int32 [2, 2]",
    ),
    "lookback_alone": (
        broken(lookback_ids=None),
        "lookback_ids: expected with lookback_dead, found None",
    ),
    "mask_dtype": (
        broken(dead_mask=np.zeros(7, np.int32)),
        "dead_mask: expected bool or uint8 [7], found int32 [7]",
    ),
    "boundaries_empty": (
        broken(cu_seqlens=np.zeros(0, np.int32)),
        "cu_seqlens: expected int32 [B+1], found int32 [0]",
    ),
}


@pytest.mark.parametrize(("tokens", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(tokens, text):
    arrays = {name: getattr(tokens, name) for name in HASH_INPUTS}
    with pytest.raises(InputError, match=f"^hash_ids: {re.escape(text)}$"):
        ops.hash_ids(small_layout(), small_token_map(), **arrays)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "place", "value"),
    [("token_ids", 5, VOCAB_SIZE), ("lookback_ids", (1, 0), -2), ("cu_seqlens", 1, 9)],
    ids=["id", "lookback_id", "boundary"],
)
def test_fault_on_gpu(name, place, value):
    """A GPU reports bad input once, after the fact, and the tokens concerned have no rows."""
    import torch

    tokens = dataclasses.replace(changed(name, place, value), positions=np.full(7, 50))
    ids = run_small(Torch(), tokens)
    torch.cuda.synchronize()
    with pytest.raises(EngramError):
        ops.raise_device_fault(0)
    ops.raise_device_fault(0)
    assert (ids == -1).all(axis=(1, 2)).any()


@pytest.mark.gpu
def test_boundary_far_behind_the_tokens_on_gpu():
    boundaries = np.full(1001, 4, np.int32)
    boundaries[0] = 0
    boundaries[900] = 3
    tokens = generators.tokens(np.random.default_rng(13), [4], lookback=False)
    ids = run_small(Torch(), dataclasses.replace(tokens, cu_seqlens=boundaries))
    with pytest.raises(EngramError, match=r"cu_seqlens\[900\]: .*, found 3"):
        ops.raise_device_fault(0)
    np.testing.assert_array_equal(ids, expected(tokens))


@pytest.mark.gpu
def test_token_map_without_a_pad_id_on_gpu():
    tokens = generators.tokens(np.random.default_rng(14), [4], lookback=False, start=False)
    tokens = dataclasses.replace(tokens, positions=tokens.positions + 9)  # an unknown past
    layout, token_map = small_layout(max_ngram_size=4), small_token_map()
    token_map[layout.config.pad_token_id] = -2
    ids = run(Torch(), layout, token_map, tokens)
    with pytest.raises(EngramError, match=r"token_map\[\d+\]: expected 0 or more, found -2"):
        ops.raise_device_fault(0)
    assert (ids[0] == -1).all()


@pytest.mark.gpu
def test_padding_on_gpu():
    """Tokens past the last boundary are padding: -1, and no fault."""
    tokens = generators.tokens(np.random.default_rng(11), [3, 4])
    padded = dataclasses.replace(
        tokens,
        token_ids=np.concatenate([tokens.token_ids, [0, 0]]).astype(np.int32),
        positions=np.concatenate([tokens.positions, [0, 0]]),
        dead_mask=np.concatenate([tokens.dead_mask, [False, False]]),
    )
    ids = run_small(Torch(), padded)
    ops.raise_device_fault(0)
    np.testing.assert_array_equal(ids[:7], expected(tokens))
    assert (ids[7:] == -1).all()


@pytest.mark.gpu
def test_graph_replay():
    device = Torch()
    layout = small_layout()
    first, second = (
        generators.tokens(np.random.default_rng(seed), [5, 0, 8], dead=0.1) for seed in (12, 13)
    )
    inputs = {name: device.put(getattr(first, name)) for name in HASH_INPUTS}
    token_map = device.put(small_token_map())
    out = device.put(np.zeros((13, 2, 6), np.int32))
    following = device.put(np.zeros((3, 3), np.int32))
    graph = capture(
        lambda: ops.hash_ids(layout, token_map, **inputs, next_lookback_out=following, out=out)
    )
    for name, tensor in inputs.items():
        tensor.copy_(device.put(getattr(second, name)))
    graph.replay()
    np.testing.assert_array_equal(device.get(out), expected(second))
    np.testing.assert_array_equal(device.get(following), reference.next_lookback(second, 3))
