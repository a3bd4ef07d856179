# SPDX-License-Identifier: Apache-2.0
"""engram.json: what a store holds and where. Written last, so a folder with one is a whole store.

    format            "trtllm-engram store"
    format_version    1; a reader refuses newer ones
    requires          the first release of trtllm-engram that reads it
    checkpoint        absolute folder of the parts whose root is "checkpoint", or null
    content_id        root (block_sums.py) of the tables: each layer's values, then its scales
    fingerprint       of the layout and the token map (layout.py)
    config            the Engram keys of config.json
    layout            multipliers [L, N] and primes [L, N-1, H]
    token_map         part, I32 [vocab]: raw token id to compressed id
    tokenizer         part, U8: tokenizer.json
    layers            one object per Engram layer: layer, and tensors with its six parts
    manifest_sum      XXH3-128 of all other keys as JSON, keys sorted, no spaces; for verify

A part is raw little-endian bytes in a file: root ("store" or "checkpoint"), file (relative),
offset, shape, dtype, file_size and mtime_ns of that file when it was prepared, block_sums (one per
64 MiB).
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from trtllm_engram.builder.block_sums import Span, num_blocks, sum_root
from trtllm_engram.builder.checkpoint import SCALES, TENSORS, VALUES, files_of, tensor_shapes
from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.files import (
    read_regular,
    reading,
    resolve_member,
    stat_regular,
    write_aside,
)
from trtllm_engram.builder.layout import EngramLayout
from trtllm_engram.builder.safetensors_file import shown
from trtllm_engram.plugins.errors import InputError

MANIFEST_FILE = "engram.json"
FORMAT = "trtllm-engram store"
FORMAT_VERSION = 1
_REQUIRES = "0.1.0"

STORE = "store"
CHECKPOINT = "checkpoint"

_MAX_SIZE = 2**63 - 1
_OWN_SUM = "manifest_sum"
_ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "BF16": 2, "I32": 4}


@dataclass(frozen=True)
class Part:
    """A tensor's bytes in a file, and what that file was when it was prepared."""

    root: str
    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    file_size: int
    mtime_ns: int
    block_sums: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """What engram.json says. checkpoint is None where every part lies in the store."""

    config: EngramConfig
    layout: EngramLayout = field(compare=False)  # follows from the config
    fingerprint: str
    checkpoint: Path | None
    token_map: Part
    tokenizer: Part
    layers: dict[int, dict[str, Part]]

    @property
    def content_id(self) -> str:
        """What the tables hold, wherever they lie."""
        return sum_root(
            text
            for parts in self.layers.values()
            for name in (VALUES, SCALES)
            for text in parts[name].block_sums
        )

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Every part, with its name."""
        yield "token_map", self.token_map
        yield "tokenizer", self.tokenizer
        for layer_id, parts in self.layers.items():
            for name, part in parts.items():
                yield f"layers.{layer_id}.engram.{name}", part

    def span(self, store: Path, part: Part) -> Span:
        """Where a part's bytes are."""
        in_store = part.root == STORE or self.checkpoint is None
        root = store if in_store else self.checkpoint
        return Span(resolve_member(Path(root or store), part.file), part.offset, part.nbytes)

    def files(self, store: Path) -> list[Path]:
        """Every file that the store and its checkpoint are made of."""
        files = [store / MANIFEST_FILE, *(self.span(store, part).file for _, part in self.parts())]
        return files if self.checkpoint is None else files + files_of(self.checkpoint)

    def check_files(self, store: Path) -> None:
        """Refuses files that are not those that were prepared.

        A store's own files may be moved about, which changes their time stamps, so of them only
        the sizes must be right.
        """
        self.check_checkpoint()
        for _, part in self.parts():
            problem = self.file_problem(store, part)
            if problem:
                raise InputError(problem)

    def check_checkpoint(self) -> None:
        """Refuses a folder of the checkpoint's parts that is not there."""
        if self.checkpoint is None:
            return
        with reading(self.checkpoint):
            is_folder = self.checkpoint.is_dir()
        if not is_folder:
            raise InputError(
                f"{self.checkpoint}: expected the store's checkpoint, found no folder; "
                f"--checkpoint DIR says where it lies now"
            )

    def file_problem(self, store: Path, part: Part, *, any_time: bool = False) -> str | None:
        """What is wrong with a part's file, judged without reading it."""
        file = self.span(store, part).file
        status = stat_regular(file)
        if status.st_size != part.file_size:
            return (
                f"{file}: changed since prepare: expected {part.file_size} bytes, "
                f"found {status.st_size}"
            )
        if part.root == CHECKPOINT and not any_time and status.st_mtime_ns != part.mtime_ns:
            return (
                f"{file}: changed since prepare: expected mtime_ns {part.mtime_ns}, "
                f"found {status.st_mtime_ns}; if only the time stamp changed: "
                f"trtllm-engram verify {store} --restamp"
            )
        return None


def write_manifest(store: Path, manifest: Manifest) -> None:
    """The last step of every change to a store."""
    data = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "requires": _REQUIRES,
        "checkpoint": None if manifest.checkpoint is None else str(manifest.checkpoint),
        "content_id": manifest.content_id,
        "fingerprint": manifest.fingerprint,
        "config": manifest.config.to_dict(),
        "layout": _layout_data(manifest.layout),
        "token_map": asdict(manifest.token_map),
        "tokenizer": asdict(manifest.tokenizer),
        "layers": [
            {"layer": layer_id, "tensors": {name: asdict(part) for name, part in parts.items()}}
            for layer_id, parts in manifest.layers.items()
        ],
    }
    data[_OWN_SUM] = _sum_of(data)
    with write_aside(store / MANIFEST_FILE) as scratch:
        scratch.write_text(json.dumps(data, indent=1) + "\n", encoding="ascii")


def read_manifest(
    store: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> Manifest:
    """Reads and checks engram.json, but none of the files it names. checkpoint relocates the
    checkpoint's parts.
    """
    path = Path(store) / MANIFEST_FILE
    with reading(path):
        if not path.exists():
            raise InputError(f"{store}: expected a store (with {MANIFEST_FILE}), found none")
    content = read_regular(path)
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON: {error}") from error
    return _parse(_Fields(str(path), data), checkpoint)


def manifest_problem(store: Path) -> str | None:
    """What differs in engram.json from what was written, where it holds its own sum."""
    path = store / MANIFEST_FILE
    data = json.loads(read_regular(path))
    expected = data.pop(_OWN_SUM, None)
    found = _sum_of(data)
    if expected in (None, found):
        return None
    return f"{path}: expected sum {shown(expected)}, found {found}"


def _sum_of(data: dict[str, Any]) -> str:
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(canonical.encode("ascii")).hexdigest()


class _Fields:
    """A JSON object from outside, read field by field; errors name the place."""

    def __init__(self, where: str, data: object) -> None:
        if not isinstance(data, dict):
            raise InputError(f"{where}: expected an object, found {reprlib.repr(data)}")
        self.where = where
        self.data: dict[str, Any] = data

    def refuse(self, key: str, expected: str) -> InputError:
        found = reprlib.repr(self.data[key]) if key in self.data else "none"
        return InputError(f"{self.where}: {key}: expected {expected}, found {found}")

    def inner(self, key: str) -> _Fields:
        return _Fields(f"{self.where}: {key}", self.data.get(key))

    def text(self, key: str, pattern: str = r"(?s:.+)") -> str:
        value = self.data.get(key)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise self.refuse(key, f"text like {pattern}")
        return value

    def integer(self, key: str, low: int = 0) -> int:
        value = self.data.get(key)
        if type(value) is not int or not low <= value <= _MAX_SIZE:
            raise self.refuse(key, "an integer of 63 bits")
        return value

    def items(self, key: str) -> list[Any]:
        value = self.data.get(key)
        if not isinstance(value, list):
            raise self.refuse(key, "a list")
        return value


def _parse(fields: _Fields, relocated: str | os.PathLike[str] | None) -> Manifest:
    if fields.data.get("format") != FORMAT:
        raise fields.refuse("format", repr(FORMAT))
    version = fields.integer("format_version", 1)
    if version > FORMAT_VERSION:
        release = fields.data.get("requires")
        known = isinstance(release, str) and re.fullmatch(r"[0-9a-z.+-]{1,32}", release)
        raise InputError(
            f"{fields.where}: format_version: expected at most {FORMAT_VERSION}, found {version}: "
            f"use trtllm-engram {release if known else 'of a later release'}"
            f"{' or newer' if known else ''}"
        )
    config = EngramConfig.from_dict(fields.inner("config").data, where=f"{fields.where}: config")
    layout = EngramLayout(config)
    if fields.data.get("layout") != _layout_data(layout):
        raise InputError(f"{fields.where}: layout: does not follow from the config")
    checkpoint = None
    if fields.data.get("checkpoint") is not None:
        checkpoint = Path(relocated or fields.text("checkpoint", r"(?s:/[^\0]*)"))
    manifest = Manifest(
        config=config,
        layout=layout,
        fingerprint=fields.text("fingerprint", "[0-9a-f]{64}"),
        checkpoint=checkpoint,
        token_map=_parse_part(fields.inner("token_map"), "I32", None),
        tokenizer=_parse_part(fields.inner("tokenizer"), "U8", None),
        layers=_parse_layers(fields, config),
    )
    if fields.text("content_id") != manifest.content_id:
        raise fields.refuse("content_id", f"the root of the block sums, {manifest.content_id}")
    for name, part in manifest.parts():
        if part.root == CHECKPOINT and checkpoint is None:
            raise InputError(
                f"{fields.where}: checkpoint: expected a folder for {name}, found none"
            )
    return manifest


def _parse_layers(fields: _Fields, config: EngramConfig) -> dict[int, dict[str, Part]]:
    items = fields.items("layers")
    if len(items) != config.num_layers:
        raise fields.refuse("layers", f"{config.num_layers} layers")
    layers = {}
    for layer_id, item in zip(config.layer_ids, items, strict=True):
        layer = _Fields(f"{fields.where}: layers: {layer_id}", item)
        if layer.integer("layer") != layer_id:
            raise layer.refuse("layer", str(layer_id))
        tensors = layer.inner("tensors")
        shapes = tensor_shapes(config)[layer_id]
        layers[layer_id] = {
            name: _parse_part(tensors.inner(name), *shapes[name]) for name in TENSORS
        }
    return layers


def _parse_part(fields: _Fields, dtype: str, shape: tuple[int, ...] | None) -> Part:
    """shape None: any of one dimension."""
    sizes = fields.items("shape")
    if shape is None and len(sizes) == 1 and type(sizes[0]) is int and 0 < sizes[0] <= _MAX_SIZE:
        shape = (sizes[0],)
    if shape is None or sizes != list(shape):
        raise fields.refuse("shape", "[size]" if shape is None else str(list(shape)))
    part = Part(
        root=fields.text("root", f"{STORE}|{CHECKPOINT}"),
        file=fields.text("file"),
        offset=fields.integer("offset"),
        shape=shape,
        dtype=fields.text("dtype", dtype),
        file_size=fields.integer("file_size"),
        mtime_ns=fields.integer("mtime_ns", -_MAX_SIZE),
        block_sums=tuple(fields.items("block_sums")),
    )
    resolve_member(Path(fields.where), part.file)
    if part.offset + part.nbytes > part.file_size:
        raise fields.refuse("offset", f"{part.nbytes} bytes inside {part.file_size}")
    if len(part.block_sums) != num_blocks(part.nbytes) or not all(
        isinstance(text, str) and re.fullmatch("[0-9a-f]{32}", text) for text in part.block_sums
    ):
        raise fields.refuse("block_sums", f"{num_blocks(part.nbytes)} sums of 32 hex digits")
    return part


def _layout_data(layout: EngramLayout) -> dict[str, Any]:
    return {"multipliers": layout.multipliers.tolist(), "primes": layout.primes.tolist()}
