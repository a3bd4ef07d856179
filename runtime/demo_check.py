# SPDX-License-Identifier: Apache-2.0
"""The Engram arithmetic a second time, in plain numpy, for the demo and the benchmarks to hold the
results against.

Nothing here is shared with the library: ids come from numpy's integers, FP8 and BF16 from
ml_dtypes, sums from numpy's matrix product.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_engram.builder import EngramLayout

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int32]

_BLOCK = 32  # values, or rows and columns of the weight, that share a scale
_TILE_ROWS = 3200  # of the projection's weight dequantised at a time: 80 MB
_BF16_FRACTION_BITS = 7
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def hash_ids(layout: EngramLayout, token_map: Ids, token_ids: Ids) -> Ids:
    """Row ids [T, L, C] of one text from its beginning, no token dead."""
    config = layout.config
    compressed = token_map[token_ids].astype(np.int64)
    pad = int(token_map[config.pad_token_id])
    out = np.empty((token_ids.size, config.num_layers, config.num_columns), np.int32)
    for layer in range(config.num_layers):
        rolling = np.zeros(token_ids.size, np.int64)
        for shift in range(config.max_ngram_size):
            source = np.concatenate([np.full(shift, pad), compressed])[: token_ids.size]
            rolling ^= source * layout.multipliers[layer, shift]
            for head in range(config.n_heads if shift else 0):
                column = (shift - 1) * config.n_heads + head
                prime = layout.primes[layer, shift - 1, head]
                out[:, layer, column] = rolling % prime + layout.offsets[layer, column]
    return out


def rows(values: Bytes, scales: Bytes, ids: Ids) -> npt.NDArray[Any]:
    """BF16 [T, C*D] of ids [T, C] that all lie inside the table."""
    exponents = scales[ids].astype(np.int32) - 127
    blocks = _FP8_VALUES[values[ids]].reshape(*exponents.shape, _BLOCK)
    exact = np.ldexp(blocks, exponents[..., None]).reshape(ids.shape[0], -1)
    rounded: npt.NDArray[Any] = exact.astype(ml_dtypes.bfloat16)
    return rounded


def projection(x: npt.NDArray[Any], weight: Bytes, scale: Bytes) -> Floats:
    """FP32 [T, out] of BF16 x [T, in], before the rounding to BF16."""
    wide = x.astype(np.float32)
    out = np.empty((x.shape[0], weight.shape[0]), np.float32)
    for start in range(0, weight.shape[0], _TILE_ROWS):
        tile = _FP8_VALUES[weight[start : start + _TILE_ROWS]]
        exponents = scale[start // _BLOCK : -(-(start + tile.shape[0]) // _BLOCK)]
        factors = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
        wide_factors = np.repeat(np.repeat(factors, _BLOCK, axis=0), _BLOCK, axis=1)
        tile *= wide_factors[: tile.shape[0], : tile.shape[1]]
        out[:, start : start + tile.shape[0]] = wide @ tile.T
    return out


def gate(
    hidden: npt.NDArray[Any],
    kv: npt.NDArray[Any],
    q_weight: npt.NDArray[Any],
    k_weight: npt.NDArray[Any],
    eps: float,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """FP64 (hidden + g * value, |hidden| + |g * value|), [T, hc_mult, hidden].

    The second is what an ulp is taken of: after a cancellation one of the result means little.
    """
    h = hidden.astype(np.float64)
    _, hc_mult, size = h.shape
    key = kv[:, : hc_mult * size].astype(np.float64).reshape(h.shape)
    value = kv[:, hc_mult * size :].astype(np.float64)[:, None]
    weights = q_weight.astype(np.float64) * k_weight.astype(np.float64)
    dot = (h * weights * key).sum(axis=-1) / np.sqrt(size)
    dot /= np.sqrt((h * h).mean(axis=-1) + eps) * np.sqrt((key * key).mean(axis=-1) + eps)
    root = np.where(dot < 0, -1.0, 1.0) * np.sqrt(np.maximum(np.abs(dot), 1e-6))
    added = value / (1 + np.exp(-root))[..., None]
    return h + added, np.abs(h) + np.abs(added)


def max_ulps(
    found: npt.NDArray[Any], expected: npt.NDArray[Any], magnitude: npt.NDArray[Any]
) -> float:
    """Largest |found - expected| in units of a BF16 ulp of `magnitude`; infinite where a NaN is."""
    _, exponent = np.frexp(magnitude)  # magnitude = m * 2**exponent with 0.5 <= m < 1
    ulp = np.ldexp(1.0, exponent - 1 - _BF16_FRACTION_BITS)
    error = np.abs(found.astype(expected.dtype) - expected) / ulp
    worst = float(error.max(initial=0.0))
    return worst if np.isfinite(worst) else float("inf")
