# SPDX-License-Identifier: Apache-2.0
"""A store in name alone: the sizes of a config's tables and no files, for tables that are filled by
the formula of formula.py. No engine takes them for its own: their fingerprint is nobody's."""

from __future__ import annotations

from pathlib import Path

from trtllm_engram.builder.block_sums import num_blocks
from trtllm_engram.builder.checkpoint import tensor_shapes
from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.layout import EngramLayout
from trtllm_engram.builder.manifest import STORE, Manifest, Part, write_manifest

_SUM = "0" * 32
_FINGERPRINT = "0" * 64


def write_made_up_store(folder: Path, config: EngramConfig) -> None:
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
    write_manifest(folder, manifest)


def _part(file: str, dtype: str, shape: tuple[int, ...]) -> Part:
    sizes = Part(STORE, file, 0, shape, dtype, 0, 0, ())
    sums = (_SUM,) * num_blocks(sizes.nbytes)
    return Part(STORE, file, 0, shape, dtype, sizes.nbytes, 0, sums)
