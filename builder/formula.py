# SPDX-License-Identifier: Apache-2.0
"""The weights of a synthesized checkpoint: a formula of (layer, tensor, place, seed), so that any
row can be checked without a table.

Byte i of a tensor (byte b of row r is i = r * row_bytes + b) is byte i % 8, lowest first, of word
i // 8. With 64-bit arithmetic that wraps, and tensor the position in TENSORS:

    mix(z):  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
             z = (z ^ (z >> 27)) * 0x94D049BB133111EB
             z ^ (z >> 31)
    key     = mix(mix(seed) ^ (layer * 8 + tensor))
    word(j) = (mix(key + (j + 1) * 0x9E3779B97F4A7C15) & mask) + bias

which is SplitMix64's output from the state key on, with

    embed.weight  mask BFBFBFBFBFBFBFBF, bias 0                 FP8, -1.875 to 1.875, never NaN
    embed.scale   mask 0303030303030303, bias 7C7C7C7C7C7C7C7C  2^-3 to 2^0
    wkv.weight    as embed.weight
    wkv.scale     mask 0101010101010101, bias E in each byte    2^(E-127) or twice that, where
                  E = 127 - round(log2(C*D / 9) / 2) makes the projection's outputs about 1
    q_weight      mask 00FF00FF00FF00FF, bias 3F003F003F003F00  BF16, 0.5 to 2
    k_weight      as q_weight
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.checkpoint import SCALES, TENSORS, VALUES
from trtllm_engram.builder.config import SCALE_BLOCK, EngramConfig

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = 2**64 - 1
_CHUNK_WORDS = 1 << 15  # with its scratch it stays in a core's cache

_EACH_BYTE = 0x0101010101010101
_EACH_PAIR = 0x0001000100010001
_FP8 = (0xBF * _EACH_BYTE, 0)
_BF16 = (0xFF * _EACH_PAIR, 0x3F00 * _EACH_PAIR)

_Words = npt.NDArray[np.uint64]


class Formula:
    """One tensor's bytes."""

    def __init__(self, config: EngramConfig, layer_id: int, name: str, seed: int) -> None:
        state = np.array([seed], dtype=np.uint64)
        _mix(state)
        state ^= np.uint64(layer_id * 8 + TENSORS.index(name))
        _mix(state)
        self._key = int(state[0])
        base = 127 - round(log2(config.row_dim / 9) / 2)
        patterns = {
            VALUES: _FP8,
            SCALES: (0x03 * _EACH_BYTE, 0x7C * _EACH_BYTE),
            "wkv.weight": _FP8,
            "wkv.scale": (_EACH_BYTE, base * _EACH_BYTE),
            "q_weight": _BF16,
            "k_weight": _BF16,
        }
        self._mask, self._bias = (np.uint64(word) for word in patterns[name])

    def bytes_at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """The bytes at any places, in the places' shape."""
        words = (places.astype(np.uint64) >> np.uint64(3)) + np.uint64(1)
        words *= np.uint64(_GOLDEN)
        words += np.uint64(self._key)
        self._finish(words, np.empty_like(words))
        shifts = (places.astype(np.uint64) & np.uint64(7)) * np.uint64(8)
        words >>= shifts
        found: npt.NDArray[np.uint8] = words.astype(np.uint8)
        return found

    def chunks(self, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """(place, bytes) over a range that begins at a word, each valid until the next."""
        steps = np.arange(_CHUNK_WORDS, dtype=np.uint64) * np.uint64(_GOLDEN)
        words, scratch = np.empty_like(steps), np.empty_like(steps)
        for place in range(begin, end, 8 * _CHUNK_WORDS):
            first = self._key + (place // 8 + 1) * _GOLDEN
            np.add(steps, np.uint64(first & _WORD), out=words)
            self._finish(words, scratch)
            yield place, memoryview(words.view(np.uint8))[: end - place]

    def _finish(self, words: _Words, scratch: _Words) -> None:
        _mix(words, scratch)
        words &= self._mask
        words += self._bias


def row_bytes(
    config: EngramConfig, layer_id: int, rows: npt.NDArray[np.integer], seed: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Values [..., D] and scales [..., D/32] of any rows of a layer's table."""
    values, scales = (
        Formula(config, layer_id, name, seed).bytes_at(
            rows.astype(np.int64)[..., None] * width + np.arange(width)
        )
        for name, width in ((VALUES, config.head_dim), (SCALES, config.head_dim // SCALE_BLOCK))
    )
    return values, scales


def _mix(words: _Words, scratch: _Words | None = None) -> None:
    scratch = np.empty_like(words) if scratch is None else scratch
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        np.right_shift(words, np.uint64(shift), out=scratch)
        words ^= scratch
        words *= np.uint64(factor)
    np.right_shift(words, np.uint64(31), out=scratch)
    words ^= scratch
