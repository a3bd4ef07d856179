# SPDX-License-Identifier: Apache-2.0
"""Where each hash column's rows lie, and the hash's constants: all that follows from a config."""

import hashlib
import json
import os
from math import isqrt

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.config import SCALE_BLOCK, EngramConfig, config_file
from trtllm_engram.builder.token_map import token_map_digest
from trtllm_engram.plugins.errors import InputError

# What the fingerprint calls V4.1's row format (row.h) and hash (layout.h).
ROW_FORMAT = "fp8_e4m3_e8m0"
HASH_KIND = "deepseek_v4.1"

_MAX_ROWS = 2**31 - 1  # row ids are int32
_SEGMENT = 1 << 20  # numbers sieved at a time: 60,000 primes or more


class EngramLayout:
    """Primes, offsets and multipliers of every Engram layer, as engram.md defines them.

    Attributes (arrays are int64 and read-only):
        config: what the layout was made from.
        primes: [L, N-1, H] rows of each hash head.
        offsets: [L, C] first row of each column; column (order-2)*H + head.
        multipliers: [L, N] odd factors of the rolling hash.
        num_embeddings: rows of each layer's table.
    """

    def __init__(self, config: EngramConfig) -> None:
        self.config = config
        self.primes = find_primes(
            config.num_layers, config.max_ngram_size, config.n_heads, config.engram_vocab_size
        )
        columns = self.primes.reshape(config.num_layers, config.num_columns)
        ends = np.cumsum(columns, axis=1)
        self.offsets = ends - columns
        self.multipliers = _find_multipliers(config)
        self.num_embeddings: tuple[int, ...] = tuple(ends[:, -1].tolist())
        self._check_rows()
        for array in (self.primes, self.offsets, self.multipliers):
            array.setflags(write=False)

    def fingerprint(self, token_map: npt.NDArray[np.int32]) -> str:
        """SHA-256, in hex, of all that decides which rows a text reads and what a row holds.

        The digest is of this JSON in ASCII: keys in this order, no spaces, integers in decimal.

            {"block":32,"compressed_pad_id":P,"format":"fp8_e4m3_e8m0","hash":"deepseek_v4.1",
             "head_dim":D,"layer_ids":[...],"max_ngram_size":N,"multipliers":[[...],...],
             "n_heads":H,"primes":[[[...],...],...],"token_map":"<hex of token_map_digest>"}
        """
        config = self.config
        if token_map.ndim != 1 or config.pad_token_id >= token_map.size:
            raise InputError(
                f"token map: expected shape [vocab] with engram_pad_token_id {config.pad_token_id} "
                f"inside, found {list(token_map.shape)}"
            )
        content = {
            "format": ROW_FORMAT,
            "hash": HASH_KIND,
            "max_ngram_size": config.max_ngram_size,
            "n_heads": config.n_heads,
            "head_dim": config.head_dim,
            "block": SCALE_BLOCK,
            "layer_ids": list(config.layer_ids),
            "primes": self.primes.tolist(),
            "multipliers": self.multipliers.tolist(),
            "compressed_pad_id": int(token_map[config.pad_token_id]),
            "token_map": token_map_digest(token_map),
        }
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def _check_rows(self) -> None:
        config = self.config
        for layer_id, rows, found in zip(
            config.layer_ids, self.num_embeddings, config.num_embeddings, strict=True
        ):
            if rows > _MAX_ROWS:
                raise InputError(
                    f"engram_vocab_size: expected at most {_MAX_ROWS} rows in a layer (int32 ids), "
                    f"found {rows} in layer {layer_id}"
                )
            if rows != found:
                raise InputError(
                    f"engram_num_embeddings: expected {rows} rows in layer {layer_id}, "
                    f"the sum of its primes, found {found}"
                )


def read_layout(path: str | os.PathLike[str]) -> EngramLayout:
    """The layout of a config.json, or of the one in a checkpoint's folder; errors name the file."""
    file = config_file(path)
    config = EngramConfig.from_pretrained(file)
    try:
        return EngramLayout(config)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def find_primes(
    num_layers: int, max_ngram_size: int, n_heads: int, engram_vocab_size: int
) -> npt.NDArray[np.int64]:
    """Primes [L, N-1, H], whose sums over a layer are its table's rows.

    Each head takes the smallest prime from engram_vocab_size on that no head before it has taken,
    in any layer, so together they are consecutive primes.
    """
    shape = (num_layers, max_ngram_size - 1, n_heads)
    count = num_layers * (max_ngram_size - 1) * n_heads
    low = max(engram_vocab_size, 2)
    segments = []
    while count > 0:
        segments.append(_primes_between(low, low + _SEGMENT)[:count])
        low += _SEGMENT
        count -= segments[-1].size
    return np.concatenate(segments).reshape(shape)


def _primes_between(low: int, high: int) -> npt.NDArray[np.int64]:
    """The primes of [low, high), by a sieve; low is at least 2."""
    is_prime = np.ones(high - low, dtype=np.bool_)
    root = isqrt(high)
    divisors = _primes_between(2, root + 1).tolist() if root >= 2 else []
    for divisor in divisors:
        first = max(divisor * divisor, -(-low // divisor) * divisor)
        is_prime[first - low :: divisor] = False
    primes: npt.NDArray[np.int64] = np.flatnonzero(is_prime) + np.int64(low)
    return primes


def _find_multipliers(config: EngramConfig) -> npt.NDArray[np.int64]:
    # A compressed id times a multiplier stays below 2^63: the hash never wraps.
    bound = max(1, (2**63 - 1) // config.compressed_vocab_size // 2)
    rows = [
        np.random.default_rng(10007 * layer_id).integers(
            0, bound, size=config.max_ngram_size, dtype=np.int64
        )
        for layer_id in config.layer_ids
    ]
    return np.stack(rows) * 2 + 1
