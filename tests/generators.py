# SPDX-License-Identifier: Apache-2.0
"""Inputs for tests. Table rows are a formula of (row, byte): a row can be told by its content."""

import functools
import json
from pathlib import Path

import numpy as np
from reference import LOST, Layout, Tokens

GOLDEN = Path(__file__).parent / "golden"
HASH_INPUTS = (
    "token_ids",
    "positions",
    "cu_seqlens",
    "lookback_ids",
    "lookback_dead",
    "dead_mask",
)


def golden(name):
    """The arrays and the parameters of a reference vector."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays), json.loads((GOLDEN / f"{name}.json").read_text())


@functools.cache
def golden_layout(name):
    _, config = golden(name)
    return Layout(
        config["engram_layer_ids"],
        config["engram_max_ngram_size"],
        config["engram_n_heads"],
        config["engram_vocab_size"],
        config["engram_compressed_vocab_size"],
        config["engram_pad_token_id"],
    )


@functools.cache
def golden_token_map():
    """The map of the DeepSeek V4 tokenizer; test_token_map builds it anew."""
    with np.load(GOLDEN / "token_map.npz") as arrays:
        return arrays["token_map"]


VOCAB_SIZE = 101
COMPRESSED_SIZE = 61


@functools.cache
def small_layout(max_ngram_size=4, n_heads=2, num_layers=2):
    return Layout(range(1, num_layers + 1), max_ngram_size, n_heads, 500, COMPRESSED_SIZE)


def small_token_map():
    return (np.arange(VOCAB_SIZE) * 7 % COMPRESSED_SIZE).astype(np.int32)


def tokens(rng, lengths, window=3, lookback=True, dead=0.0, start=True, lost=0.0):
    """Requests of these lengths, each at some position of its sequence; `dead` and `lost` are
    probabilities."""
    firsts = rng.integers(0, 2 * window + 1, len(lengths)) if start else np.zeros(len(lengths), int)
    parts = [np.arange(first, first + n) for first, n in zip(firsts, lengths, strict=True)]
    total = sum(lengths)
    shape = (len(lengths), window)
    lookback_ids = rng.integers(0, VOCAB_SIZE, shape).astype(np.int32)
    lookback_ids[rng.random(shape) < 0.2] = -1
    if lost:
        lookback_ids[rng.random(shape) < lost] = LOST
    return Tokens(
        token_ids=rng.integers(0, VOCAB_SIZE, total).astype(np.int32),
        positions=np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        lookback_ids=lookback_ids if lookback else None,
        lookback_dead=(rng.random(shape) < dead) if lookback else None,
        dead_mask=rng.random(total) < dead,
    )


def table(num_rows, head_dim=256):
    """FP8 values without NaN [rows, D] and scales around 1 [rows, D/32]."""
    row = np.arange(num_rows, dtype=np.int64)[:, None]
    values = row * 131 + np.arange(head_dim) * 7 + (row >> 8) * 29
    scales = 120 + (row * 5 + np.arange(head_dim // 32) * 3) % 15
    values = np.where(values % 128 == 127, 0, values)
    return values.astype(np.uint8), scales.astype(np.uint8)


def every_pair():
    """A table whose row s has scale byte s everywhere and the value bytes 0 to 255."""
    values = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    return values, np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)


def row_ids(rng, num_tokens, num_columns, num_rows):
    """Ids of rows, some of them missing: -1, past the end, the ends of int32, whose
    lowest is the lost id."""
    ids = rng.integers(0, num_rows, (num_tokens, num_columns))
    missing = rng.choice([-1, -2, num_rows, 2**31 - 1, -(2**31)], ids.shape)
    return np.where(rng.random(ids.shape) < 0.1, missing, ids).astype(np.int32)


def bf16(rng, *shape, scale=1.0):
    """Normal random numbers as BF16 bits."""
    return (
        (rng.standard_normal(shape) * scale)
        .astype(np.float32)
        .view(np.uint32)
        .__rshift__(16)
        .astype(np.uint16)
    )


def fp8_weights(rng, out_features, in_features):
    """FP8 weights without NaN and a scale for each block of 32x32, near 1/64."""
    weight = rng.integers(0, 127, (out_features, in_features))
    weight = weight + 128 * rng.integers(0, 2, weight.shape)
    blocks = (-(-out_features // 32), -(-in_features // 32))
    return weight.astype(np.uint8), rng.integers(118, 124, blocks).astype(np.uint8)
