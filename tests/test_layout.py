# SPDX-License-Identifier: Apache-2.0
"""EngramLayout: the golden primes, offsets and multipliers, and a fingerprint of all it holds."""

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np
import pytest
from golden_config import GOLDEN, golden_config, golden_primes

from trtllm_engram.builder import EngramConfig, EngramLayout, token_map_digest
from trtllm_engram.builder.layout import find_primes
from trtllm_engram.plugins.errors import InputError

CASES = ["hash_full", "hash_tiny"]
TOKEN_MAP = np.array([0, 1, 2, 1, 3], dtype=np.int32)


def make_layout(name: str = "hash_tiny", **changes: Any) -> EngramLayout:
    return EngramLayout(EngramConfig.from_dict(golden_config(name, **changes)))


def slow_primes(num_layers: int, max_ngram_size: int, n_heads: int, start: int) -> np.ndarray:
    """The search as engram.md words it."""
    taken: set[int] = set()
    primes = np.empty((num_layers, max_ngram_size - 1, n_heads), dtype=np.int64)
    for layer in range(num_layers):
        for order in range(max_ngram_size - 1):
            number = start - 1
            for head in range(n_heads):
                number += 1
                while (
                    number in taken
                    or number < 2
                    or any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1))
                ):
                    number += 1
                taken.add(number)
                primes[layer, order, head] = number
    return primes


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    layout = make_layout(name)
    arrays = np.load(GOLDEN / f"{name}.npz")
    assert np.array_equal(layout.primes, golden_primes(name))
    assert np.array_equal(layout.offsets, arrays["offsets"])
    assert np.array_equal(layout.multipliers, arrays["multipliers"])
    for array in (layout.primes, layout.offsets, layout.multipliers):
        assert array.dtype == np.int64
        assert not array.flags.writeable


def test_true_row_counts() -> None:
    assert make_layout("hash_full").num_embeddings == (384006168, 384016682)


@pytest.mark.parametrize(
    "sizes", [(1, 2, 1, 1), (2, 3, 4, 2), (3, 4, 2, 3), (2, 8, 16, 7), (3, 2, 5, 1000)], ids=str
)
def test_primes_are_those_of_the_search(sizes: tuple[int, int, int, int]) -> None:
    assert np.array_equal(find_primes(*sizes), slow_primes(*sizes))


def test_primes_over_several_segments() -> None:
    primes = find_primes(125, 5, 200, 1).ravel()
    assert (primes[0], primes[-1]) == (2, 1299709)  # the first and the 100,000th prime
    assert np.all(np.diff(primes) > 0)


@pytest.mark.parametrize("compressed_vocab_size", [1, 2, 2**31 - 1])
def test_multipliers_cannot_overflow(compressed_vocab_size: int) -> None:
    layout = make_layout(engram_compressed_vocab_size=compressed_vocab_size)
    assert np.all(layout.multipliers % 2 == 1)
    assert layout.multipliers.min() > 0
    assert int(layout.multipliers.max()) * (compressed_vocab_size - 1) < 2**63


def test_wrong_row_count_names_the_layer_and_both_numbers() -> None:
    rows = [384006168, 384016681]
    with pytest.raises(
        InputError, match=r"engram_num_embeddings: expected 384016682 .* layer 14,.* 384016681"
    ):
        make_layout("hash_full", engram_num_embeddings=rows)


def test_rows_past_int32() -> None:
    # 24 * 89478485 is just below 2^31, the sum of the primes is not.
    with pytest.raises(InputError, match=r"2147483647 rows in a layer .* in layer 1$"):
        make_layout("hash_full", engram_vocab_size=89478485)


def test_fingerprint_is_of_the_documented_json() -> None:
    layout = make_layout(engram_pad_token_id=3)  # whose compressed id is another number
    config = layout.config
    text = (
        '{"block":32,"compressed_pad_id":1,"format":"fp8_e4m3_e8m0","hash":"deepseek_v4.1",'
        f'"head_dim":{config.head_dim},"layer_ids":{list(config.layer_ids)},'
        f'"max_ngram_size":3,"multipliers":{layout.multipliers.tolist()},"n_heads":4,'
        f'"primes":{layout.primes.tolist()},"token_map":"{token_map_digest(TOKEN_MAP)}"}}'
    ).replace(" ", "")
    assert json.loads(text)
    assert layout.fingerprint(TOKEN_MAP) == hashlib.sha256(text.encode()).hexdigest()


def test_fingerprint_is_stable() -> None:
    """Stores and plans hold fingerprints: another value breaks them all."""
    expected = "c7f14bde5cb2bd6ad41878706632ed5dad5e28c28e89a650141c76cef55d2a24"
    assert make_layout().fingerprint(TOKEN_MAP) == expected


def test_fingerprint_changes_with_each_part() -> None:
    tiny = make_layout()
    last = int(tiny.primes[2, 1, 3])
    variants = [
        make_layout(engram_layer_ids=[0, 3, 8]),
        make_layout(engram_head_dim=128),
        make_layout(engram_compressed_vocab_size=99091),
        make_layout(engram_pad_token_id=1),
    ]
    moved = find_primes(3, 3, 4, 1010)
    rows = moved.sum(axis=(1, 2)).tolist()
    variants.append(make_layout(engram_vocab_size=1010, engram_num_embeddings=rows))
    assert int(moved[2, 1, 3]) != last
    fingerprints = {layout.fingerprint(TOKEN_MAP) for layout in [tiny, *variants]}
    fingerprints.add(tiny.fingerprint(TOKEN_MAP[::-1]))
    assert len(fingerprints) == len(variants) + 2


def test_fingerprint_ignores_what_rows_do_not_depend_on() -> None:
    config = make_layout().config
    other = dataclasses.replace(config, hidden_size=64, hc_mult=2, rms_norm_eps=1e-5)
    assert EngramLayout(other).fingerprint(TOKEN_MAP) == make_layout().fingerprint(TOKEN_MAP)


@pytest.mark.parametrize("shape", [(2,), (0,), (1, 5)], ids=str)
def test_fingerprint_refuses_a_map_without_the_pad_token(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="token map: expected"):
        make_layout().fingerprint(np.zeros(shape, dtype=np.int32))
