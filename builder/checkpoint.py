# SPDX-License-Identifier: Apache-2.0
"""A safetensors checkpoint as published: its config, its tokenizer and the six Engram tensors of
each layer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from trtllm_engram.builder.config import CONFIG_FILE, SCALE_BLOCK, EngramConfig
from trtllm_engram.builder.files import read_regular, reading, resolve_member
from trtllm_engram.builder.layout import EngramLayout, read_layout
from trtllm_engram.builder.safetensors_file import TensorEntry, read_header, shown
from trtllm_engram.plugins.errors import InputError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"

VALUES = "embed.weight"
SCALES = "embed.scale"
TENSORS = (VALUES, SCALES, "wkv.weight", "wkv.scale", "q_weight", "k_weight")

# Other frameworks rewrite the published names.
_NAME = re.compile(r"(?:model\.|model\.language_model\.)?layers\.([0-9]{1,9})\.engram\.(.+)")
_ALIASES = {"wkv.weight_scale_inv": "wkv.scale"}

_logger = logging.getLogger("trtllm_engram")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose Engram parts are all there and of the right shape.

    path is absolute and keeps symlinks; tensors[layer_id][name] has each of TENSORS.
    """

    path: Path
    config: EngramConfig
    layout: EngramLayout
    tensors: dict[int, dict[str, TensorEntry]]

    @property
    def tokenizer_json(self) -> Path:
        return self.path / TOKENIZER_FILE

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Reads headers only, never the tables."""
        root = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow symlinks
        with reading(root):
            is_folder = root.is_dir()
        if not is_folder:
            raise InputError(f"{root}: expected a checkpoint folder")
        layout = read_layout(root)
        config = layout.config
        tensors = _engram_tensors(root, _all_tensors(root), config)
        shapes = tensor_shapes(config)
        for layer_id, found in tensors.items():
            for name, (dtype, shape) in shapes[layer_id].items():
                _check_tensor(layer_id, found[name], name, dtype, shape)
        return cls(root, config, layout, tensors)


def files_of(checkpoint: Path) -> list[Path]:
    """The files that a checkpoint is made of, of other modules than Engram too.

    An index that is not there, or says nothing, adds none: a store needs none to be run.
    """
    names = {CONFIG_FILE, TOKENIZER_FILE, INDEX_FILE, SINGLE_FILE}
    with contextlib.suppress(InputError):
        names |= set(_read_weight_map(checkpoint / INDEX_FILE).values())
    return [checkpoint / name for name in sorted(names)]


def tensor_shapes(config: EngramConfig) -> dict[int, dict[str, tuple[str, tuple[int, ...]]]]:
    """Dtype and shape of each layer's six tensors."""
    wkv = (config.kv_dim, config.row_dim)
    gate = (config.hc_mult, config.hidden_size)
    return {
        layer_id: {
            VALUES: ("F8_E4M3", (rows, config.head_dim)),
            SCALES: ("F8_E8M0", (rows, config.head_dim // SCALE_BLOCK)),
            "wkv.weight": ("F8_E4M3", wkv),
            "wkv.scale": ("F8_E8M0", (-(-wkv[0] // SCALE_BLOCK), -(-wkv[1] // SCALE_BLOCK))),
            "q_weight": ("BF16", gate),
            "k_weight": ("BF16", gate),
        }
        for layer_id, rows in zip(config.layer_ids, config.num_embeddings, strict=True)
    }


def _all_tensors(root: Path) -> dict[str, TensorEntry]:
    """Every tensor of every shard.

    A shard that is missing or cut short is an error even where no Engram tensor lies in it: such a
    download is not complete.
    """
    index = root / INDEX_FILE
    with reading(root):
        has_index, has_single = index.exists(), (root / SINGLE_FILE).exists()
    if not has_index:
        if not has_single:
            raise InputError(f"{root}: expected {INDEX_FILE} or {SINGLE_FILE}, found neither")
        return read_header(root / SINGLE_FILE)
    weight_map = _read_weight_map(index)
    shards = {}
    for shard in dict.fromkeys(weight_map.values()):
        file = resolve_member(root, shard)
        with reading(file):
            is_there = file.exists()
        if not is_there:
            raise InputError(f"{file}: missing shard, named in {INDEX_FILE}")
        shards[shard] = read_header(file)
    tensors = {}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise InputError(f"{root / shard}: expected tensor {shown(name)}, found none")
        tensors[name] = shards[shard][name]
    return tensors


def _read_weight_map(index: Path) -> dict[str, str]:
    content = read_regular(index)
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{index}: expected JSON: {error}") from error
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: weight_map: expected an object, found {shown(weight_map)}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise InputError(
                f"{index}: weight_map: {shown(name)}: expected a file name, found {shown(shard)}"
            )
    return weight_map


def _engram_tensors(
    root: Path, tensors: dict[str, TensorEntry], config: EngramConfig
) -> dict[int, dict[str, TensorEntry]]:
    found: dict[int, dict[str, TensorEntry]] = {layer_id: {} for layer_id in config.layer_ids}
    for name, entry in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        layer_id, short = int(match[1]), _ALIASES.get(match[2], match[2])
        if layer_id not in found or short not in TENSORS:
            _logger.warning("%s: ignored unknown Engram tensor %s", entry.file, shown(name))
        elif short in found[layer_id]:
            other = found[layer_id][short].name
            raise InputError(f"{root}: tensors {other!r} and {name!r} are the same one")
        else:
            found[layer_id][short] = entry
    for layer_id, layer in found.items():
        for short in TENSORS:
            if short not in layer:
                raise InputError(
                    f"{root}: expected tensor layers.{layer_id}.engram.{short}, found none"
                )
    return found


def _check_tensor(
    layer_id: int, entry: TensorEntry, short: str, dtype: str, shape: tuple[int, ...]
) -> None:
    where = f"{entry.file}: tensor {entry.name!r}"
    if entry.dtype != dtype:
        raise InputError(f"{where}: expected dtype {dtype}, found {entry.dtype}")
    if entry.shape == shape:
        return
    if short in (VALUES, SCALES) and entry.shape[1:] == shape[1:]:
        raise InputError(
            f"{where}: expected {shape[0]} rows, the sum of layer {layer_id}'s primes, "
            f"found {entry.shape[0]}"
        )
    raise InputError(f"{where}: expected shape {list(shape)}, found {list(entry.shape)}")
