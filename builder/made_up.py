# SPDX-License-Identifier: Apache-2.0
"""A store in name alone: the sizes of a config's tables and no files, for tables that are filled by
the formula of formula.py. No engine takes them for its own: their fingerprint is nobody's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trtllm_engram.builder.block_sums import num_blocks
from trtllm_engram.builder.checkpoint import tensor_shapes
from trtllm_engram.builder.config import SCALE_BLOCK, EngramConfig
from trtllm_engram.builder.layout import EngramLayout, find_primes
from trtllm_engram.builder.manifest import STORE, Manifest, Part, write_manifest

_SUM = "0" * 32
_FINGERPRINT = "0" * 64

# V4.1's columns, but for the number of their rows.
_MAX_NGRAM_SIZE, _HEADS, _HEAD_DIM = 4, 8, 256


def config_of_size(num_bytes: int, layers: Sequence[int] = (1, 14)) -> EngramConfig:
    """V4.1's columns with tables that have about so many bytes in all layers together."""
    columns = len(layers) * (_MAX_NGRAM_SIZE - 1) * _HEADS
    vocab_size = max(2, num_bytes // (columns * (_HEAD_DIM + _HEAD_DIM // SCALE_BLOCK)))
    primes = find_primes(len(layers), _MAX_NGRAM_SIZE, _HEADS, vocab_size)
    return EngramConfig(
        layer_ids=tuple(layers),
        num_embeddings=tuple(primes.reshape(len(layers), -1).sum(axis=1).tolist()),
        max_ngram_size=_MAX_NGRAM_SIZE,
        n_heads=_HEADS,
        head_dim=_HEAD_DIM,
        engram_vocab_size=vocab_size,
        compressed_vocab_size=vocab_size,
        pad_token_id=0,
        hidden_size=SCALE_BLOCK,
        hc_mult=1,
        rms_norm_eps=1e-6,
    )


def write_made_up_store(folder: str | os.PathLike[str], config: EngramConfig) -> None:
    """Writes engram.json into a folder."""
    layers = {
        layer_id: {
            name: _part(f"layer-{layer_id}.{name}", dtype, shape)
            for name, (dtype, shape) in tensors.items()
        }
        for layer_id, tensors in tensor_shapes(config).items()
    }
    manifest = Manifest(
        config=config,
        layout=EngramLayout(config),
        fingerprint=_FINGERPRINT,
        checkpoint=None,
        token_map=_part("token_map", "I32", (1,)),
        tokenizer=_part("tokenizer", "U8", (1,)),
        layers=layers,
    )
    write_manifest(Path(folder), manifest)


def _part(file: str, dtype: str, shape: tuple[int, ...]) -> Part:
    sizes = Part(STORE, file, 0, shape, dtype, 0, 0, ())
    sums = (_SUM,) * num_blocks(sizes.nbytes)
    return Part(STORE, file, 0, shape, dtype, sizes.nbytes, 0, sums)
