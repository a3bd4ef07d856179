# SPDX-License-Identifier: Apache-2.0
"""A checkpoint for trtllm-build: a base decoder's, with the Engram weights of a store.

The tables stay in the store. A rank's file has the base's tensors, unchanged, and on the first
pipeline stage, where token ids come in, these:

    engram.token_map            INT32 [vocab]
    engram.layer_{i}.words      INT32 [out, C*D/4]: wkv.weight in weight_layout, four bytes a word
    engram.layer_{i}.scales     INT32 [words]: wkv.scale, four bytes a word, the last one padded
    engram.layer_{i}.query      BF16 [hc_mult, hidden]: q_weight
    engram.layer_{i}.key        BF16 [hc_mult, hidden]: k_weight

where out is (hc_mult+1)*hidden, or of a projection split among ranks this rank's part of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_engram.builder.block_sums import Progress
from trtllm_engram.builder.config import CONFIG_FILE
from trtllm_engram.builder.dtypes import SAFETENSORS
from trtllm_engram.builder.files import (
    check_free_bytes,
    new_folder,
    read_regular,
    reading,
    sync,
    write_aside,
    write_at,
    writing,
)
from trtllm_engram.builder.layers import ModelStore, table_name
from trtllm_engram.builder.model import HIDDEN_DTYPES
from trtllm_engram.builder.nodes import Host, words
from trtllm_engram.builder.safetensors_file import (
    TensorEntry,
    TensorSpec,
    create_file,
    read_header,
    shown,
)
from trtllm_engram.builder.tensor_parallel import rank_projection
from trtllm_engram.builder.trtllm.section import (
    ARCHITECTURE,
    LAYER_TENSORS,
    TOKEN_MAP,
    EngramSection,
    layer_prefix,
)
from trtllm_engram.builder.weight_layout import ROW_MAJOR, lay_weight
from trtllm_engram.plugins.errors import InputError

_QUANT_FILE = "quant_cfg.json"  # a mixed-precision checkpoint's second config
_CHUNK = 16 << 20


def write_checkpoint(
    store: ModelStore,
    base: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    architecture: str = ARCHITECTURE,
    history: str = "explicit",
    weight_layout: str = ROW_MAJOR,
    split_projection: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes folder `output`, config.json last; returns what config.json holds.

    Args:
        store: an open store.
        base: a TensorRT-LLM checkpoint: config.json and rank0.safetensors and so on.
        architecture: the class that trtllm-build shall build, by --model_cls_name.
        history: a key of section.HISTORIES.
        weight_layout: of the projection's weight; sm90_v1 is the fastest on GPUs of compute
            capability 9.0, which alone take it.
        split_projection: each rank of the base's tensor parallelism has its part of the
            projection's outputs, not the whole of it.

    Raises:
        InputError: the base is no checkpoint, or none that this store's layers fit into.
    """
    base, output = Path(base), Path(output)
    config = _read_json(base / CONFIG_FILE)
    tp_size, pp_size = _mapping(base / CONFIG_FILE, config)
    num_ranks = tp_size if split_projection else 1
    section = EngramSection(
        base_architecture=str(config.get("architecture")),
        history=history,
        fingerprint=store.manifest.fingerprint,
        tables={layer_id: table_name(layer_id) for layer_id in store.config.layer_ids},
        config=store.config,
        weight_layout=weight_layout,
        projection_ranks=num_ranks,
    )
    _check_base(base / CONFIG_FILE, config, store)
    config |= {"architecture": architecture, "engram": section.to_dict()}
    parts = [_engram_tensors(store, section, rank) for rank in range(num_ranks)]
    plans = []
    for rank in range(tp_size * pp_size):
        file = base / f"rank{rank}.safetensors"
        entries = read_header(file)
        own = [name for name in entries if name.startswith("engram.")]
        if own:
            raise InputError(f"{file}: expected no Engram tensors, found {shown(own[0])}")
        is_first_stage = rank < tp_size
        plans.append((file.name, entries, parts[rank % num_ranks] if is_first_stage else {}))
    total = sum(_num_bytes(entries, added) for _, entries, added in plans)
    with new_folder(output):
        check_free_bytes(output, total)
        done = 0
        for name, entries, added in plans:
            for count in _write_rank(output / name, entries, added):
                done += count
                if progress is not None:
                    progress(done, total)
        if (base / _QUANT_FILE).exists():
            with write_aside(output / _QUANT_FILE) as scratch:
                scratch.write_bytes(read_regular(base / _QUANT_FILE))
        with write_aside(output / CONFIG_FILE) as scratch:
            scratch.write_text(json.dumps(config, indent=2))
    return config


def _engram_tensors(store: ModelStore, section: EngramSection, rank: int) -> dict[str, Host]:
    """The parameters that a store adds to a rank's model, by name."""
    tensors: dict[str, Host] = {TOKEN_MAP: store.token_map}
    for layer_id in store.config.layer_ids:
        weights = store.weights(layer_id)
        weight, scale = rank_projection(
            weights.wkv_weight, weights.wkv_scale, rank, section.projection_ranks
        )
        values = (
            words(lay_weight(weight, section.weight_layout)),
            words(scale.reshape(-1)),
            weights.q_weight,
            weights.k_weight,
        )
        for name, value in zip(LAYER_TENSORS, values, strict=True):
            tensors[f"{layer_prefix(layer_id)}.{name}"] = value
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_regular(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: expected JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object")
    return data


def _check_base(path: Path, config: Mapping[str, Any], store: ModelStore) -> None:
    own = store.config
    if not isinstance(config.get("architecture"), str):
        raise InputError(f"{path}: architecture: expected a name, as convert_checkpoint.py writes")
    if "engram" in config:
        raise InputError(f"{path}: expected a base checkpoint, found one with Engram layers")
    if config.get("dtype") not in HIDDEN_DTYPES:
        raise InputError(
            f"{path}: dtype: expected one of {', '.join(HIDDEN_DTYPES)}, "
            f"found {config.get('dtype')!r}"
        )
    for name, expected, whose in (
        ("hidden_size", own.hidden_size, "hidden_size of the store"),
        ("vocab_size", store.token_map.size, "entries of the store's token map"),
    ):
        if config.get(name) != expected:
            raise InputError(
                f"{path}: {name}: expected {expected} ({whose}), found {config.get(name)!r}"
            )
    if config.get("hc_mult", 1) != own.hc_mult:
        raise InputError(
            f"{path}: hc_mult: expected {own.hc_mult}, of the store, found a residual stream of "
            f"{config.get('hc_mult', 1)}"
        )
    num_layers = config.get("num_hidden_layers")
    if type(num_layers) is not int or max(own.layer_ids) >= num_layers:
        raise InputError(
            f"{path}: num_hidden_layers: expected more than {max(own.layer_ids)}, the store's last "
            f"layer, found {num_layers!r}"
        )


def _mapping(path: Path, config: Mapping[str, Any]) -> tuple[int, int]:
    """tp_size and pp_size; rank r is of pipeline stage r // tp_size."""
    mapping = config.get("mapping") or {}
    sizes = [mapping.get(key, 1) for key in ("tp_size", "pp_size")]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise InputError(f"{path}: mapping: expected tp_size and pp_size above 0, found {sizes}")
    return sizes[0], sizes[1]


def _num_bytes(entries: Mapping[str, TensorEntry], added: Mapping[str, Host]) -> int:
    return sum(entry.nbytes for entry in entries.values()) + sum(
        value.nbytes for value in added.values()
    )


def _write_rank(
    path: Path, entries: Mapping[str, TensorEntry], added: Mapping[str, Host]
) -> Iterator[int]:
    """Writes a rank's file, and says after each piece how many bytes it had."""
    specs = [TensorSpec(entry.name, entry.dtype, entry.shape) for entry in entries.values()]
    specs += [
        TensorSpec(name, SAFETENSORS[value.dtype.name], value.shape)
        for name, value in added.items()
    ]
    with writing(path):
        places = create_file(path, specs)
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for name, entry in entries.items():
            offset = places[name].offset
            with reading(entry.file), entry.file.open("rb") as file:
                file.seek(entry.offset)
                for start in range(0, entry.nbytes, _CHUNK):
                    piece = file.read(min(_CHUNK, entry.nbytes - start))
                    with writing(path):
                        write_at(handle, piece, offset + start)
                    yield len(piece)
        for name, value in added.items():
            with writing(path):
                data = np.ascontiguousarray(value).view(np.uint8)
                write_at(handle, data.reshape(-1).data, places[name].offset)
            yield value.nbytes
    finally:
        os.close(handle)
    with writing(path):
        sync(path)
