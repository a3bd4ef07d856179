# SPDX-License-Identifier: Apache-2.0
"""prepare: from a checkpoint to a store.

    STORE/engram.json          written last: without it there is no store
    STORE/token_map.npy        int32 [vocab]
    STORE/tokenizer.json       the checkpoint's, so that a store can take text
    STORE/weights.safetensors  wkv.weight, wkv.scale, q_weight and k_weight of each layer
    STORE/tables/              with copy: raw bytes, layer-<i>.values and layer-<i>.scales

A folder that holds anything else is refused. One that holds a store stays as it is: preparing the
same checkpoint again changes nothing, another one is refused. Whatever goes wrong (Ctrl-C too),
what was written is removed; only a kill or a power cut leaves files, and the next prepare goes on
from them (copy.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.block_sums import (
    Block,
    Progress,
    shifted,
    sum_blocks,
    sums_by_span,
)
from trtllm_engram.builder.checkpoint import SCALES, TENSORS, TOKENIZER_FILE, VALUES, Checkpoint
from trtllm_engram.builder.copy import copy_spans, remove_journal
from trtllm_engram.builder.files import check_free_bytes, stat_regular, write_aside, write_at
from trtllm_engram.builder.manifest import (
    CHECKPOINT,
    MANIFEST_FILE,
    STORE,
    Manifest,
    Part,
    read_manifest,
    write_manifest,
)
from trtllm_engram.builder.safetensors_file import TensorEntry, TensorSpec, create_file
from trtllm_engram.builder.store_folder import (
    TABLES_FOLDER,
    TOKEN_MAP_FILE,
    WEIGHTS_FILE,
    claimed,
)
from trtllm_engram.builder.token_map import build_token_map
from trtllm_engram.plugins.errors import InputError

# The tables' tensors, and what their copies are called.
_TABLES = {VALUES: "values", SCALES: "scales"}
# In the order of weights.safetensors: items of two bytes first, so that they lie at even places.
_WEIGHTS = ("q_weight", "k_weight", "wkv.weight", "wkv.scale")

_Entries = Mapping[tuple[int, str], TensorEntry]  # by layer and name
_Parts = dict[tuple[int, str], Part]


def prepare(
    checkpoint: str | os.PathLike[str],
    store: str | os.PathLike[str],
    *,
    copy: bool = False,
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> Manifest:
    """Writes a store for a checkpoint; the module's text says what it leaves when."""
    source = Checkpoint.open(checkpoint)
    token_map = build_token_map(source.tokenizer_json, source.config)
    path = Path(os.path.abspath(store))  # noqa: PTH100 - resolve() would follow symlinks
    fingerprint = source.layout.fingerprint(token_map)
    existing = _existing_store(path, source, fingerprint, copy)
    if existing is not None:
        return existing
    with claimed(path):
        # Another prepare may have finished just now.
        existing = _existing_store(path, source, fingerprint, copy)
        return existing or _fill(path, source, token_map, copy, progress, num_threads)


def _fill(
    store: Path,
    source: Checkpoint,
    token_map: npt.NDArray[np.int32],
    copy: bool,
    progress: Progress | None,
    num_threads: int | None,
) -> Manifest:
    weights = _entries(source, _WEIGHTS)
    tables = _entries(source, _TABLES)
    stamps = {file: _stamp(file) for file in {entry.file for entry in (weights | tables).values()}}
    weight_bytes = sum(entry.nbytes for entry in weights.values())
    total = weight_bytes + sum(entry.nbytes for entry in tables.values())

    parts = _write_weights(store, weights, shifted(progress, 0, total), num_threads)
    take = _copy_tables if copy else _refer_to_tables
    parts |= take(store, source, tables, shifted(progress, weight_bytes, total), num_threads)
    for file, stamp in stamps.items():
        if _stamp(file) != stamp:
            raise InputError(f"{file}: changed while it was read")

    manifest = Manifest(
        config=source.config,
        layout=source.layout,
        fingerprint=source.layout.fingerprint(token_map),
        checkpoint=None if copy else source.path,
        token_map=_write_token_map(store, token_map),
        tokenizer=_write_tokenizer(store, source.tokenizer_json),
        layers={
            layer_id: {name: parts[layer_id, name] for name in TENSORS}
            for layer_id in source.config.layer_ids
        },
    )
    write_manifest(store, manifest)
    remove_journal(store / TABLES_FOLDER)
    return manifest


def _refer_to_tables(
    store: Path,
    source: Checkpoint,
    tables: _Entries,
    progress: Progress | None,
    num_threads: int | None,
) -> _Parts:
    shutil.rmtree(store / TABLES_FOLDER, ignore_errors=True)  # of a copy that was killed
    spans = [entry.span for entry in tables.values()]
    sums = sum_blocks(spans, progress=progress, num_threads=num_threads)
    return {
        key: _part(CHECKPOINT, source.path, entry.file, entry.offset, entry, texts)
        for (key, entry), texts in zip(tables.items(), sums_by_span(spans, sums), strict=True)
    }


def _copy_tables(
    store: Path,
    source: Checkpoint,  # the same arguments as _refer_to_tables
    tables: _Entries,
    progress: Progress | None,
    num_threads: int | None,
) -> _Parts:
    folder = store / TABLES_FOLDER
    names = [f"layer-{layer_id}.{_TABLES[name]}" for layer_id, name in tables]
    spans = [entry.span for entry in tables.values()]
    sums = copy_spans(folder, spans, names, progress=progress, num_threads=num_threads)
    return {
        key: _part(STORE, store, folder / file, 0, entry, texts)
        for (key, entry), file, texts in zip(
            tables.items(), names, sums_by_span(spans, sums), strict=True
        )
    }


def _write_weights(
    store: Path, weights: _Entries, progress: Progress | None, num_threads: int | None
) -> _Parts:
    path = store / WEIGHTS_FILE
    check_free_bytes(store, sum(entry.nbytes for entry in weights.values()))
    specs = [
        TensorSpec(f"layers.{layer_id}.engram.{name}", entry.dtype, entry.shape)
        for (layer_id, name), entry in weights.items()
    ]
    spans = [entry.span for entry in weights.values()]
    with write_aside(path) as scratch:
        copies = list(create_file(scratch, specs).values())
        with scratch.open("r+b", buffering=0) as file:

            def write_copy(block: Block, position: int, data: memoryview) -> None:
                write_at(file.fileno(), data, copies[block.span_idx].offset + position)

            sums = sum_blocks(spans, sink=write_copy, progress=progress, num_threads=num_threads)
    return {
        key: _part(STORE, store, path, copy.offset, copy, texts)
        for key, copy, texts in zip(weights, copies, sums_by_span(spans, sums), strict=True)
    }


def _write_token_map(store: Path, token_map: npt.NDArray[np.int32]) -> Part:
    path = store / TOKEN_MAP_FILE
    with write_aside(path) as scratch, scratch.open("wb") as file:
        np.save(file, token_map.astype("<i4"), allow_pickle=False)
    offset = stat_regular(path).st_size - token_map.nbytes
    return _whole_part(store, path, offset, "I32", token_map.shape)


def _write_tokenizer(store: Path, tokenizer_json: Path) -> Part:
    path = store / TOKENIZER_FILE
    with write_aside(path) as scratch:
        shutil.copyfile(tokenizer_json, scratch)
    return _whole_part(store, path, 0, "U8", (stat_regular(path).st_size,))


def _whole_part(store: Path, path: Path, offset: int, dtype: str, shape: tuple[int, ...]) -> Part:
    nbytes = stat_regular(path).st_size - offset
    entry = TensorEntry(path.name, dtype, shape, path, offset, nbytes)
    texts = sums_by_span([entry.span], sum_blocks([entry.span]))[0]
    return _part(STORE, store, path, offset, entry, texts)


def _part(
    root: str, folder: Path, file: Path, offset: int, entry: TensorEntry, sums: Sequence[str]
) -> Part:
    size, mtime_ns = _stamp(file)
    name = file.relative_to(folder).as_posix()
    return Part(root, name, offset, entry.shape, entry.dtype, size, mtime_ns, tuple(sums))


def _entries(source: Checkpoint, names: Iterable[str]) -> dict[tuple[int, str], TensorEntry]:
    return {
        (layer_id, name): layer[name]
        for name in names
        for layer_id, layer in source.tensors.items()
    }


def _stamp(file: Path) -> tuple[int, int]:
    status = stat_regular(file)
    return status.st_size, status.st_mtime_ns


def _existing_store(
    store: Path, source: Checkpoint, fingerprint: str, copy: bool
) -> Manifest | None:
    """The store that is already there, if it is the one that is wanted."""
    if not (store / MANIFEST_FILE).exists():
        return None
    manifest = read_manifest(store)
    is_same = (
        manifest.config == source.config
        and manifest.fingerprint == fingerprint
        and manifest.checkpoint == (None if copy else source.path)
        and all(
            _is_same_table(manifest.layers[layer_id][name], entry, copy)
            for (layer_id, name), entry in _entries(source, _TABLES).items()
        )
        and _same_weights(manifest, source)
    )
    if not is_same:
        raise InputError(
            f"{store}: holds a store of another checkpoint, of an older state of it, or made with "
            f"another --copy; remove it or choose another folder"
        )
    manifest.check_files(store)
    return manifest


def _is_same_table(part: Part, entry: TensorEntry, copy: bool) -> bool:
    size, mtime_ns = _stamp(entry.file)
    if copy:  # a copy keeps its source's time
        return part.mtime_ns == mtime_ns
    return (part.offset, part.file_size, part.mtime_ns) == (entry.offset, size, mtime_ns)


def _same_weights(manifest: Manifest, source: Checkpoint) -> bool:
    entries = _entries(source, _WEIGHTS)
    spans = [entry.span for entry in entries.values()]
    texts = sums_by_span(spans, sum_blocks(spans))
    return all(
        manifest.layers[layer_id][name].block_sums == sums
        for (layer_id, name), sums in zip(entries, texts, strict=True)
    )
