# SPDX-License-Identifier: Apache-2.0
"""Slow, obvious twins of every op in numpy, written from the definition, without the library.

FP8, E8M0 and BF16 are bits (uint8, uint8, uint16) here, in and out.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import ml_dtypes
import numpy as np

BLOCK = 32
NAN_BITS = 0x7FFF
DEAD = object()  # a source that ends the n-gram
LOST = -(2**31)  # a lookback id, and the row id of what needs one


def is_prime(number):
    return number > 1 and all(number % factor for factor in range(2, math.isqrt(number) + 1))


class Layout:
    """What hash_ids reads of an EngramLayout."""

    def __init__(self, layer_ids, max_ngram_size, n_heads, engram_vocab_size, compressed, pad=2):
        self.config = SimpleNamespace(pad_token_id=pad)
        self.multipliers = np.stack(
            [
                np.random.default_rng(10007 * layer_id).integers(
                    0,
                    max(1, (2**63 - 1) // compressed // 2),
                    size=max_ngram_size,
                    dtype=np.int64,
                )
                * 2
                + 1
                for layer_id in layer_ids
            ]
        )
        taken = set()
        self.primes = np.empty((len(layer_ids), max_ngram_size - 1, n_heads), np.int64)
        for layer, order in np.ndindex(self.primes.shape[:2]):
            number = engram_vocab_size - 1
            for head in range(n_heads):
                number += 1
                while number in taken or not is_prime(number):
                    number += 1
                taken.add(number)
                self.primes[layer, order, head] = number
        columns = self.primes.reshape(len(layer_ids), -1)
        self.offsets = np.cumsum(columns, axis=1) - columns


@dataclass
class Tokens:
    """The inputs of a hash, as hash_ids takes them; None where an input is left out."""

    token_ids: np.ndarray
    positions: np.ndarray
    cu_seqlens: np.ndarray | None
    lookback_ids: np.ndarray | None = None
    lookback_dead: np.ndarray | None = None
    dead_mask: np.ndarray | None = None

    @property
    def spans(self):
        """(first, end) token of each request."""
        if self.cu_seqlens is None:
            return [(token, token + 1) for token in range(len(self.token_ids))]
        return list(zip(self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True))


def source(tokens, token_map, pad, request, token, shift):
    """Compressed id of the position `shift` before a token of a request, DEAD or LOST."""
    first, _ = tokens.spans[request]
    position = tokens.positions[token] - shift
    if position < 0:
        return DEAD
    first_position = tokens.positions[first]
    if position >= first_position:
        if tokens.dead_mask is not None and tokens.dead_mask[token - shift]:
            return DEAD
        return token_map[tokens.token_ids[token - shift]]
    column = first_position - 1 - position
    if tokens.lookback_ids is None or column >= tokens.lookback_ids.shape[1]:
        return pad
    raw = tokens.lookback_ids[request, column]
    if raw == -1:
        return pad
    if tokens.lookback_dead is not None and tokens.lookback_dead[request, column]:
        return DEAD
    return LOST if raw == LOST else token_map[raw]


def hash_ids(layout, token_map, tokens):
    num_layers, num_orders, num_heads = layout.primes.shape
    pad = token_map[layout.config.pad_token_id]
    ids = np.full((len(tokens.token_ids), num_layers, num_orders * num_heads), -1, np.int32)
    for request, (first, end) in enumerate(tokens.spans):
        for token in range(first, end):
            values = []
            for shift in range(num_orders + 1):
                found = source(tokens, token_map, pad, request, token, shift)
                if found is DEAD:
                    values += [pad] * (num_orders + 1 - shift)
                    break
                values.append(found)
            if LOST in values:
                ids[token] = LOST
                continue
            for layer in range(num_layers):
                rolling = 0
                for k, value in enumerate(values):
                    rolling ^= int(value) * int(layout.multipliers[layer, k])
                    for head in range(num_heads) if k else ():
                        column = (k - 1) * num_heads + head
                        prime = int(layout.primes[layer, k - 1, head])
                        ids[token, layer, column] = rolling % prime + layout.offsets[layer, column]
    return ids


def next_lookback(tokens, window):
    """The window [B, N-1] of each request's next call: newest first, -1 where nothing is known."""
    result = np.full((len(tokens.spans), window), -1, np.int32)
    for request, (first, end) in enumerate(tokens.spans):
        history = list(tokens.token_ids[first:end][::-1])
        if tokens.lookback_ids is not None:
            history += list(tokens.lookback_ids[request])
        history = history[:window]
        result[request, : len(history)] = history
    return result


def fp8_values(bits):
    """E4M3 as float64, by its definition."""
    bits = np.asarray(bits).astype(np.int64)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    magnitude = np.where(bits & 0x7F == 0x7F, np.nan, magnitude)
    return np.where(bits & 0x80, -magnitude, magnitude)


def e8m0_values(bits):
    bits = np.asarray(bits).astype(np.int64)
    return np.where(bits == 255, np.nan, 2.0 ** (bits - 127))


def bf16_bits(values):
    """BF16 bits of floats: FP32 first (which keeps subnormals), then to nearest even, one NaN."""
    with np.errstate(over="ignore"):
        single = np.asarray(values).astype(np.float32)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(single), NAN_BITS, rounded).astype(np.uint16)


def bf16_values(bits):
    return np.asarray(bits, np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


def gather(table, ids, first_row=0, nan=0x7F):
    """Rows [T, C, width] of a table; zeros for an id without one, and `nan` for a lost one."""
    rows = np.zeros((*ids.shape, table.shape[1]), table.dtype)
    for place in np.ndindex(ids.shape):
        row = int(ids[place]) - first_row
        if 0 <= row < len(table) and ids[place] != -1:
            rows[place] = table[row]
        elif ids[place] == LOST:
            rows[place] = nan
    return rows


def gather_scales(scales, ids, first_row):
    return gather(scales, ids, first_row, nan=0xFF)


def per_token(rows):
    """[T, ...] as [T, all the rest]."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def lookup(values, scales, ids, first_row=0):
    rows = fp8_values(gather(values, ids, first_row))
    # A row that is not there has scale bytes 0 too: 0 * 2**-127 is 0.
    factors = e8m0_values(gather_scales(scales, ids, first_row))
    return per_token(bf16_bits(rows * factors.repeat(BLOCK, axis=2)))


def lookup_packed(values, scales, ids, first_row=0):
    parts = [gather(values, ids, first_row), gather_scales(scales, ids, first_row)]
    return per_token(np.concatenate(parts, axis=2))


def lookup_mxfp8(values, scales, ids, first_row=0):
    """Values and scales in linear order."""
    parts = gather(values, ids, first_row), gather_scales(scales, ids, first_row)
    return [per_token(part) for part in parts]


def scales_128x4(scales):
    """Scales [R, S] in F8_128x4 order."""
    num_rows, num_scales = scales.shape
    tiles = -(-num_scales // 4)
    staged = np.zeros(-(-num_rows // 128) * tiles * 512, np.uint8)
    for r, s in np.ndindex(scales.shape):
        offset = (r // 128 * tiles + s // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + s % 4
        staged[offset] = scales[r, s]
    return staged


def stage_mxfp8(packed, head_dim):
    row_bytes = head_dim + head_dim // BLOCK
    rows = packed.reshape(len(packed), packed.shape[1] // row_bytes, row_bytes)
    values, scales = per_token(rows[..., :head_dim]), per_token(rows[..., head_dim:])
    return values, scales_128x4(scales)


def weights(weight, scale):
    """FP8 [O, I] with a scale for each block of 32x32, as float64."""
    out_features, in_features = weight.shape
    factors = e8m0_values(scale).repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)
    return fp8_values(weight) * factors[:out_features, :in_features]


def row_major_of_sm90_v1(laid):
    """FP8 [out, in] of the bytes of weight_layout.py's sm90_v1."""
    rows, inner = laid.shape
    places = laid.view("<u2").reshape(rows // 16, inner // 32, 8, 4, 2, 2, 2)  # R K r q j h e
    high = places >> 8 & 0x80 | places >> 4 & 0x7F
    low = places >> 4 & 0x80 | places >> 8 & 0x70 | places & 0xF
    both = np.stack([high, low], axis=1)  # R g K r q j h e
    return both.transpose(0, 1, 3, 2, 5, 6, 4, 7).reshape(rows, inner).astype(np.uint8)


def project(x, weight, scale):
    """x W^T as float64, and the sums of the absolute terms, which bound the error of FP32 sums."""
    inputs, factors = bf16_values(x), weights(weight, scale)
    return inputs @ factors.T, np.abs(inputs) @ np.abs(factors).T


def gate(hidden, kv, q_weight, k_weight, eps, token_mask=None):
    """The result and |h| + |g * value|, whose BF16 ulp the error is measured in, as float64.

    hidden is float64 [T, M, H]; the other arrays are BF16 bits.
    """
    num_tokens, copies, size = hidden.shape
    parts = bf16_values(kv).reshape(num_tokens, copies + 1, size)
    keys, value = parts[:, :copies], parts[:, copies:]
    dot = (hidden * bf16_values(q_weight) * bf16_values(k_weight) * keys).sum(axis=2)
    dot = dot / np.sqrt((hidden**2).mean(axis=2) + eps)
    dot = dot / np.sqrt((keys**2).mean(axis=2) + eps) / math.sqrt(size)
    root = np.sqrt(np.maximum(np.abs(dot), 1e-6))
    gates = 1 / (1 + np.exp(-np.where(dot < 0, -root, root)))
    if token_mask is not None:
        gates = np.where(token_mask[:, None], gates, 0)
    written = gates[..., None] * value
    return hidden + written, np.abs(hidden) + np.abs(written)


def bf16_ulp(magnitude):
    """Distance of neighbouring BF16 numbers at a magnitude."""
    exponent = np.floor(np.log2(np.maximum(np.abs(magnitude), 2.0**-126)))
    return 2.0 ** (exponent - 7)
