# SPDX-License-Identifier: Apache-2.0
"""Data for comparisons: pieces of a text with their true positions and lookback."""

import itertools

import numpy as np
import pytest
from engines import TEXT

from trtllm_engram.builder.model import ModelOptions, hidden_name
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime.compare import make_feeds

pytest_plugins = "engine_fixtures"


def test_feeds_are_pieces_of_the_text(store):
    """Token p of a request is the text's at its position, and lookback holds what came before."""
    from trtllm_engram.runtime.text import encode

    text = encode(store.tokenizer_json, TEXT)
    for feed in make_feeds(store, [(37, 3), (200, 8)], text=TEXT):
        assert feed["token_ids"].dtype == np.int32
        places = feed["positions"] % text.size
        np.testing.assert_array_equal(feed["token_ids"], text[places])
        bounds = feed["cu_seqlens"]
        for request, (first, end) in enumerate(itertools.pairwise(bounds)):
            if first == end:
                continue
            start = feed["positions"][first]
            np.testing.assert_array_equal(
                feed["positions"][first:end], start + np.arange(end - first)
            )
            for column, token in enumerate(feed["lookback_ids"][request]):
                place = start - 1 - column
                assert token == (text[place] if place >= 0 else -1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [(0, 0), (0, 1), (1, 1), (3, 9)])
def test_feeds_of_every_size_and_dtype(store, size, dtype):
    options = ModelOptions(dtype, "whole_prompt")
    (feed,) = make_feeds(store, [size], text=TEXT, options=options)
    assert "lookback_ids" not in feed
    assert feed["cu_seqlens"].shape == (size[1] + 1,)
    assert feed[hidden_name(14)].dtype.name == dtype
    assert feed[hidden_name(14)].shape == (size[0], 4, 160)
    assert set(feed["positions"][feed["cu_seqlens"][:-1][feed["cu_seqlens"][:-1] < size[0]]]) <= {0}


def test_feeds_by_seed(store):
    one, again, other = (
        make_feeds(store, [(37, 3)], text=TEXT, seed=seed)[0] for seed in (1, 1, 2)
    )
    assert all(np.array_equal(one[name], again[name]) for name in one)
    assert not np.array_equal(one["token_ids"], other["token_ids"])


@pytest.mark.parametrize("size", [(-1, 1), (1, 0)])
def test_feeds_refuse_sizes(store, size):
    with pytest.raises(InputError, match=r"^sizes: expected 0 or more tokens in 1 or more"):
        make_feeds(store, [size])


def test_feeds_refuse_a_negative_seed(store):
    with pytest.raises(InputError, match=r"^seed: expected 0 or more, found -1$"):
        make_feeds(store, [(1, 1)], seed=-1)
