# SPDX-License-Identifier: Apache-2.0
"""Valid inputs for an engine, with the statistics of real text: the data loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.dtypes import numpy_dtype
from trtllm_engram.builder.model import ModelOptions, hidden_name
from trtllm_engram.plugins.errors import InputError

from ..data_files import multilingual_text
from ..store import Store
from ..text import encode

Host = npt.NDArray[Any]
Feed = dict[str, Host]  # one call's inputs by name

_OUTLIER_SHARE = 1e-3  # of a residual stream's dimensions, which are much larger than the others
_OUTLIER_FACTOR = 30.0


def make_feeds(
    store: Store,
    sizes: Sequence[tuple[int, int]],
    *,
    text: str | None = None,
    options: ModelOptions | None = None,
    seed: int = 0,
) -> list[Feed]:
    """One feed for each (tokens, requests): random pieces of a text, each somewhere inside it.

    A piece has its true position in the text and, as lookback, the tokens before it: N-1 of them,
    fewer at the text's beginning. Hidden states are normal, with a few large dimensions.
    """
    token_ids = encode(store.tokenizer_json, multilingual_text() if text is None else text)
    if token_ids.size < 2:
        raise InputError(f"text: expected at least 2 tokens, found {token_ids.size}")
    if seed < 0:
        raise InputError(f"seed: expected 0 or more, found {seed}")
    options = options or ModelOptions()
    rng = np.random.default_rng(seed)
    return [_make_feed(store, options, rng, token_ids, *size) for size in sizes]


def _make_feed(
    store: Store,
    options: ModelOptions,
    rng: np.random.Generator,
    text: npt.NDArray[np.int32],
    num_tokens: int,
    num_requests: int,
) -> Feed:
    if num_tokens < 0 or num_requests < (1 if num_tokens else 0):
        raise InputError(
            f"sizes: expected 0 or more tokens in 1 or more requests, or none in none, "
            f"found {num_tokens} and {num_requests}"
        )
    window = store.config.max_ngram_size - 1
    cuts = np.sort(rng.integers(0, num_tokens + 1, max(num_requests - 1, 0)))
    boundaries = np.concatenate([[0], cuts, [num_tokens][:num_requests]]).astype(np.int32)
    lookback = np.full((num_requests, window), -1, np.int32)
    tokens, positions = [text[:0]], [np.arange(0)]
    for request, length in enumerate(np.diff(boundaries)):
        # A text that is too short for the piece goes round.
        start = 0 if options.history == "whole_prompt" else int(rng.integers(0, text.size))
        place = np.arange(start, start + length)
        tokens.append(text[place % text.size])
        positions.append(place)
        before = text[max(0, start - window) : start][::-1]
        lookback[request, : before.size] = before
    feed: Feed = {
        "token_ids": np.concatenate(tokens).astype(np.int32),
        "positions": np.concatenate(positions).astype(np.int64),
        "cu_seqlens": boundaries,
    }
    if options.history == "explicit":
        feed["lookback_ids"] = lookback
    for layer_id in store.config.layer_ids:
        shape = (num_tokens, store.config.hc_mult, store.config.hidden_size)
        feed[hidden_name(layer_id)] = _hidden(rng, shape, options.hidden_dtype)
    return feed


def _hidden(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Host:
    values = rng.standard_normal(shape, dtype=np.float32)
    outliers = rng.random(shape[-1]) < _OUTLIER_SHARE
    values[..., outliers] *= _OUTLIER_FACTOR
    return values.astype(numpy_dtype(dtype))
