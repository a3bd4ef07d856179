# SPDX-License-Identifier: Apache-2.0
"""Row ids of V4.1-Flash's two layers in one launch: decode steps, from 1024 tokens on prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trtllm_engram.builder import EngramLayout

from .. import demo_check, ops
from ..data_files import flash_layout
from .gpu import EMPTY, OURS, Case, Target, expect, load_torch
from .rivals import SGLANG, VLLM, Rivals

_ROW = "hash, 2 layers"
_VOCAB = 129_280
_PROMPT = 1024  # tokens of a request, from that many on; below, each token is a decode step
_CHECKED_TOKENS = 64
_DEPTH = 2  # a token id, what it is compressed to


def cases(tokens: Sequence[int], _table_gb: float, rivals: Rivals | None) -> Iterator[Case]:
    layout = flash_layout()
    rng = np.random.default_rng(0)
    token_map = rng.integers(layout.config.compressed_vocab_size, size=_VOCAB, dtype=np.int32)
    for count in tokens:
        yield _case(layout, token_map, rng, count, rivals)


def _case(
    layout: EngramLayout,
    token_map: np.typing.NDArray[np.int32],
    rng: np.random.Generator,
    num_tokens: int,
    rivals: Rivals | None,
) -> Case:
    torch = load_torch()
    config = layout.config
    is_decode = num_tokens < _PROMPT
    length = 1 if is_decode else _PROMPT
    window = config.max_ngram_size - 1
    # Each request's window, oldest first, then its tokens.
    texts = rng.integers(_VOCAB, size=(num_tokens // length, window + length), dtype=np.int32)
    lookback = texts[:, window - 1 :: -1] if is_decode else np.full((texts.shape[0], window), -1)
    first_position = window if is_decode else 0
    positions = np.tile(np.arange(first_position, first_position + length), texts.shape[0])
    starts = np.arange(0, num_tokens + 1, length)

    def put(array: Any, dtype: Any) -> Any:
        return torch.tensor(np.ascontiguousarray(array, dtype), device="cuda")

    gpu_map = put(token_map, np.int32)
    tokens = put(texts[:, window:].ravel(), np.int32)
    gpu_positions = put(positions, np.int64)
    inputs = (tokens, gpu_positions, put(starts, np.int32), put(lookback, np.int32))
    num_columns = window * config.n_heads
    shape = (num_tokens, config.num_layers, num_columns)
    outs = [torch.empty(shape, dtype=torch.int32, device="cuda") for _ in range(2)]
    contenders = {OURS: lambda: ops.hash_ids(layout, gpu_map, *inputs, out=outs[0])}
    targets = [Target(EMPTY, over_us=2.0)] if num_tokens <= 1024 else []
    if num_tokens == 8192:
        targets.append(Target(VLLM, ratio=0.65))
    if rivals:
        pad_id = int(token_map[config.pad_token_id])
        per_column = (config.num_layers, num_columns)
        constants = (
            put(layout.multipliers, np.int64),
            put(layout.primes.reshape(per_column), np.int64),
            put(layout.offsets, np.int64),
        )
        known = put(np.maximum(lookback, 0), np.int32)
        rows = put(np.repeat(np.arange(texts.shape[0]), length), np.int64)
        sglang_starts = None if is_decode else put(starts[:-1], np.int64)
        contenders[VLLM] = rivals.vllm_hash(gpu_map, pad_id, constants, *inputs, outs[1])
        contenders[SGLANG] = rivals.sglang_hash(
            gpu_map, pad_id, constants, tokens, gpu_positions, sglang_starts, rows, known
        )
    few = texts[:_CHECKED_TOKENS] if is_decode else texts[0, window : window + _CHECKED_TOKENS]
    expected = demo_check.hash_ids(layout, token_map, few.ravel())
    if is_decode:  # an id depends on the window and its token alone
        expected = expected[window :: window + 1]

    def check(name: str, ids: Any) -> None:
        right = np.array_equal(ids[:_CHECKED_TOKENS].cpu().numpy(), expected)
        expect(right and torch.equal(ids.int(), outs[0]), _ROW, num_tokens, name)

    num_bytes = sum(array.nbytes for array in inputs) + 4 * num_tokens + outs[0].nbytes
    return Case(_ROW, num_tokens, num_bytes, contenders, check, targets, depth=_DEPTH)
