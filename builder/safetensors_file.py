# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: a header reader for files from outside, and a writer for tensors of any
size.

A file is a u64 header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
The reader takes nothing on trust and never touches the data; holes between tensors are harmless and
accepted.
"""

from __future__ import annotations

import json
import os
import reprlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from trtllm_engram.builder.block_sums import Span
from trtllm_engram.builder.files import reading, stat_regular
from trtllm_engram.plugins.errors import InputError

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_SIZE = 2**63 - 1
_DATA_ALIGNMENT = 64
_METADATA = "__metadata__"

_REPR = reprlib.Repr()
_REPR.maxstring = 200

_DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file. offset counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def span(self) -> Span:
        return Span(self.file, self.offset, self.nbytes)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _DTYPE_BITS[self.dtype] // 8


def read_header(path: Path) -> dict[str, TensorEntry]:
    """All tensors of a file, by name, in the header's order."""
    file_size = stat_regular(path).st_size
    with reading(path), path.open("rb") as file:
        prefix = file.read(_LENGTH.size)
        if len(prefix) < _LENGTH.size:
            raise InputError(f"{path}: expected a safetensors file, found {file_size} bytes")
        (header_bytes,) = _LENGTH.unpack(prefix)
        if header_bytes > _MAX_HEADER_BYTES:
            raise InputError(
                f"{path}: expected a header of at most {_MAX_HEADER_BYTES} bytes, "
                f"found {header_bytes}"
            )
        data_start = _LENGTH.size + header_bytes
        content = file.read(header_bytes)
    if len(content) < header_bytes:
        raise InputError(
            f"{path}: truncated: the header ends at byte {data_start}, the file at {file_size}"
        )
    entries = {}
    for name, description in _parse_header(path, content).items():
        if name != _METADATA:
            entries[name] = _read_entry(path, name, description, data_start, file_size)
    _check_overlaps(path, entries)
    return entries


def _parse_header(path: Path, content: bytes) -> dict[str, Any]:
    try:
        header = json.loads(content.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and JSON are ValueErrors
        raise InputError(f"{path}: bad safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise InputError(f"{path}: bad safetensors header: expected a JSON object")
    return header


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {shown(key)}")
            seen.add(key)
    return result


def _read_entry(
    path: Path, name: str, description: object, data_start: int, file_size: int
) -> TensorEntry:
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(description, dict):
        raise InputError(f"{where}: expected an object, found {shown(description)}")
    dtype = description.get("dtype")
    if not isinstance(dtype, str):
        raise InputError(f"{where}: dtype: expected a string, found {shown(dtype)}")
    shape = _sizes(f"{where}: shape", description.get("shape"))
    offsets = _sizes(f"{where}: data_offsets", description.get("data_offsets"))
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InputError(
            f"{where}: data_offsets: expected begin <= end, found {shown(list(offsets))}"
        )
    begin, end = offsets
    if data_start + end > file_size:
        raise InputError(
            f"{where}: truncated or out of range: ends at byte {data_start + end}, "
            f"the file at {file_size}"
        )
    count = _num_elements(f"{where}: shape", shape)
    bits = _DTYPE_BITS.get(
        dtype
    )  # of a dtype that this version does not know, only the place counts
    if bits is not None and count * bits != (end - begin) * 8:
        raise InputError(
            f"{where}: expected {count * bits / 8:g} bytes for {dtype} {shown(list(shape))}, "
            f"found {end - begin}"
        )
    return TensorEntry(name, dtype, shape, path, data_start + begin, end - begin)


def _sizes(where: str, value: object) -> tuple[int, ...]:
    # A bool is an int to Python, but true is no size.
    if not isinstance(value, list) or not all(
        type(size) is int and 0 <= size <= _MAX_SIZE for size in value
    ):
        raise InputError(f"{where}: expected a list of sizes, found {shown(value)}")
    return tuple(value)


def _num_elements(where: str, shape: tuple[int, ...]) -> int:
    count = 0 if 0 in shape else 1
    for size in shape:
        count *= size
        if count > _MAX_SIZE:  # at once: the product of a million sizes would take hours
            raise InputError(f"{where}: {shown(list(shape))} overflows 63 bits")
    return count


def _check_overlaps(path: Path, entries: dict[str, TensorEntry]) -> None:
    ordered = sorted((entry for entry in entries.values() if entry.nbytes), key=lambda e: e.offset)
    for before, after in pairwise(ordered):
        if after.offset < before.offset + before.nbytes:
            raise InputError(
                f"{path}: tensors {shown(before.name)} and {shown(after.name)} overlap "
                f"at byte {after.offset}"
            )


def create_file(path: Path, specs: Sequence[TensorSpec]) -> dict[str, TensorEntry]:
    """Writes the header, and zeros (holes) for the data; the caller fills in each entry's bytes."""
    header: dict[str, Any] = {}
    end = 0
    for spec in specs:
        begin, end = end, end + spec.nbytes
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-(_LENGTH.size + len(content)) % _DATA_ALIGNMENT)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(content)) + content)
    data_start = _LENGTH.size + len(content)
    os.truncate(path, data_start + end)
    return {
        spec.name: TensorEntry(
            spec.name,
            spec.dtype,
            spec.shape,
            path,
            data_start + header[spec.name]["data_offsets"][0],
            spec.nbytes,
        )
        for spec in specs
    }


def shown(value: object) -> str:
    """One line for any value, long enough for a tensor's name."""
    return _REPR.repr(value)
