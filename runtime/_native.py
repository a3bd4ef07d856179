# SPDX-License-Identifier: Apache-2.0
"""The C ABI of cpp/include/engram/engram.h through ctypes.

Structures and symbols stand in the header's order. The library is loaded by the first call that
needs it, never by an import. ctypes releases the GIL during a call, and the last error is the
calling thread's own, so every function may be used from several threads at once.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import threading
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from enum import IntEnum
from typing import Any

from trtllm_engram.plugins import library_path, open_library
from trtllm_engram.plugins.errors import EngramError, InputError

CPU = -1


class Status(IntEnum):
    OK = 0
    INVALID_ARGUMENT = 1
    CUDA_UNAVAILABLE = 2
    CUDA_ERROR = 3
    DEVICE_FAULT = 4
    OUT_OF_MEMORY = 5
    INTERNAL_ERROR = 6


class Dtype(IntEnum):
    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    INT32 = 3
    INT64 = 4


class RowForm(IntEnum):
    BF16 = 0
    PACKED = 1
    MXFP8_LINEAR = 2
    MXFP8_128X4 = 3


class LookupPath(IntEnum):
    AUTO = 0
    DIRECT = 1
    SORTED = 2
    GATHERED = 3


class ProjectKernel(IntEnum):
    AUTO = 0
    GENERIC = 1
    SM90_16 = 2
    SM90_64 = 3
    SM90_128 = 4
    SM90_256 = 5
    SM90_32 = 6
    SM90_WIDE_192 = 7
    SM90_WIDE_256 = 8


class WeightLayout(IntEnum):
    ROW_MAJOR = 0
    SM90_V1 = 1


class Exec(ctypes.Structure):
    _fields_ = [("device", c_int32), ("num_threads", c_int32), ("stream", c_void_p)]


class HashArgs(ctypes.Structure):
    _fields_ = [
        ("multipliers", c_void_p),
        ("primes", c_void_p),
        ("offsets", c_void_p),
        ("token_map", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("cu_seqlens", c_void_p),
        ("lookback_ids", c_void_p),
        ("lookback_dead", c_void_p),
        ("dead_mask", c_void_p),
        ("hash_ids", c_void_p),
        ("next_lookback_ids", c_void_p),
        ("num_tokens", c_int64),
        ("num_requests", c_int32),
        ("num_layers", c_int32),
        ("max_ngram_size", c_int32),
        ("num_heads", c_int32),
        ("vocab_size", c_int32),
        ("pad_token_id", c_int32),
        ("positions_dtype", c_int32),
    ]


class HistoryArgs(ctypes.Structure):
    _fields_ = [
        ("primary_pool", c_void_p),
        ("secondary_pool", c_void_p),
        ("block_offsets", c_void_p),
        ("sequence_lengths", c_void_p),
        ("context_lengths", c_void_p),
        ("cache_indirection", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("cu_seqlens", c_void_p),
        ("lookback_ids", c_void_p),
        ("num_tokens", c_int64),
        ("num_requests", c_int32),
        ("num_contexts", c_int32),
        ("num_context_tokens", c_int32),
        ("max_blocks", c_int32),
        ("tokens_per_block", c_int32),
        ("slot_bytes", c_int32),
        ("beam_width", c_int32),
        ("max_sequence", c_int32),
        ("max_ngram_size", c_int32),
    ]


class AdaptiveRows(ctypes.Structure):
    _fields_ = [
        ("slots", c_void_p),
        ("values", c_void_p),
        ("scales", c_void_p),
        ("num_buckets", c_int64),
    ]


class HotRows(ctypes.Structure):
    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("scales", c_void_p),
        ("counts", c_void_p),
        ("num_buckets", c_int64),
        ("adaptive", AdaptiveRows),
    ]


class LookupArgs(ctypes.Structure):
    _fields_ = [
        ("values", c_void_p),
        ("scales", c_void_p),
        ("ids", c_void_p),
        ("out", c_void_p),
        ("out_scales", c_void_p),
        ("ids_stride", c_int64),
        ("first_row", c_int64),
        ("num_rows", c_int64),
        ("num_tokens", c_int64),
        ("num_columns", c_int32),
        ("head_dim", c_int32),
        ("form", c_int32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("path", c_int32),
        ("values_in_host", c_int32),
        ("num_read_blocks", c_int32),
        ("hot", HotRows),
        ("lanes", c_void_p),
    ]


class TableLookupArgs(LookupArgs):
    """A lookup in a table by name, which need not be in memory."""

    table: bytes


class StageArgs(ctypes.Structure):
    _fields_ = [
        ("packed", c_void_p),
        ("values", c_void_p),
        ("scales", c_void_p),
        ("num_tokens", c_int64),
        ("num_columns", c_int32),
        ("head_dim", c_int32),
    ]


class ProjectArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("out", c_void_p),
        ("num_tokens", c_int64),
        ("in_features", c_int32),
        ("out_features", c_int32),
        ("kernel", c_int32),
        ("weight_layout", c_int32),
    ]


class GateArgs(ctypes.Structure):
    _fields_ = [
        ("hidden", c_void_p),
        ("kv", c_void_p),
        ("q_weight", c_void_p),
        ("k_weight", c_void_p),
        ("token_mask", c_void_p),
        ("out", c_void_p),
        ("num_tokens", c_int64),
        ("hc_mult", c_int32),
        ("hidden_size", c_int32),
        ("dtype", c_int32),
        ("eps", c_float),
    ]


OpArgs = HashArgs | HistoryArgs | LookupArgs | StageArgs | ProjectArgs | GateArgs

LogFunction = ctypes.CFUNCTYPE(None, c_int32, c_char_p)

_SYMBOLS: dict[str, tuple[Any, list[Any]]] = {
    "engram_hash": (c_int32, [POINTER(HashArgs), POINTER(Exec)]),
    "engram_history": (c_int32, [POINTER(HistoryArgs), POINTER(Exec)]),
    "engram_lookup": (c_int32, [POINTER(LookupArgs), POINTER(Exec)]),
    "engram_lookup_workspace": (c_int32, [POINTER(LookupArgs), POINTER(c_int64)]),
    "engram_stage": (c_int32, [POINTER(StageArgs), POINTER(Exec)]),
    "engram_project": (c_int32, [POINTER(ProjectArgs), POINTER(Exec)]),
    "engram_gate": (c_int32, [POINTER(GateArgs), POINTER(Exec)]),
    "engram_device_fault": (c_int32, [c_int32]),
    "engram_last_error": (c_char_p, []),
    "engram_build_info": (c_char_p, []),
    "engram_bench_read_blocks": (
        c_int32,
        [c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_int32, c_int32, POINTER(c_uint64)],
    ),
    "engram_bench_read_pages": (c_int32, [c_char_p, c_void_p, c_int64, c_int32]),
    "engram_table_bind": (c_int32, [c_char_p, c_char_p, c_char_p]),
    "engram_table_bind_file": (c_int32, [c_char_p]),
    "engram_table_check_file": (c_int32, [c_char_p]),
    "engram_table_decline": (c_int32, [c_char_p, c_char_p, c_char_p, c_char_p]),
    "engram_table_progress": (c_int32, [POINTER(c_int64), POINTER(c_int64)]),
    "engram_table_cancel": (c_int32, []),
    "engram_table_unbind": (c_int32, [c_char_p]),
    "engram_table_view": (c_int32, [c_char_p, c_int32, POINTER(LookupArgs)]),
    "engram_table_host_view": (c_int32, [c_char_p, POINTER(LookupArgs)]),
    "engram_table_lookup": (c_int32, [c_char_p, POINTER(LookupArgs), POINTER(Exec)]),
    "engram_table_fault": (c_int32, [c_char_p]),
    "engram_table_describe": (c_int32, [c_char_p, c_size_t, POINTER(c_size_t)]),
    "engram_table_holders": (c_int32, [c_int32, c_char_p, c_size_t, POINTER(c_size_t)]),
    "engram_launcher_rank": (c_int32, [POINTER(c_int32)]),
    "engram_tables_serve": (c_int32, [c_char_p, c_char_p, c_char_p, c_char_p, c_char_p]),
    "engram_tables_stop": (c_int32, []),
    "engram_set_log": (c_int32, [LogFunction]),
}
_OP_SYMBOLS: dict[type, str] = {
    HashArgs: "engram_hash",
    HistoryArgs: "engram_history",
    LookupArgs: "engram_lookup",
    StageArgs: "engram_stage",
    ProjectArgs: "engram_project",
    GateArgs: "engram_gate",
}

_logger = logging.getLogger("trtllm_engram")
_library: ctypes.CDLL | None = None
_library_lock = threading.Lock()


def load() -> ctypes.CDLL:
    """The library, loaded and checked once per process."""
    global _library
    with _library_lock:
        if _library is None:
            _library = _open(str(library_path()))
        return _library


def _open(path: str) -> ctypes.CDLL:
    library = open_library(path)
    for name, (result, arguments) in _SYMBOLS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise EngramError(
                f"{path}: expected the symbol {name}, found none: "
                "the library is older than the sources: make build"
            ) from None
        function.restype = result
        function.argtypes = arguments
    library.engram_set_log(_log_function)
    # Threads of the library may outlive the interpreter that a message would be brought to.
    atexit.register(library.engram_set_log, LogFunction())
    return library


def _log_message(level: int, text: bytes) -> None:
    _logger.log(level, "%s", text.decode("utf-8", "replace"))


_log_function = LogFunction(_log_message)  # kept as long as the library may call it


def run(op: str, args: OpArgs, where: Exec) -> None:
    """Calls the function that takes these arguments; `op` begins the text of errors."""
    library = load()
    arguments = (ctypes.byref(args), ctypes.byref(where))
    if isinstance(args, TableLookupArgs):
        status = library.engram_table_lookup(args.table, *arguments)
    else:
        status = getattr(library, _OP_SYMBOLS[type(args)])(*arguments)
    _check(library, op, status)


def lookup_workspace(args: LookupArgs) -> int:
    """engram_lookup_workspace: bytes of GPU memory that a lookup takes beside its arrays."""
    library = load()
    num_bytes = c_int64()
    status = library.engram_lookup_workspace(ctypes.byref(args), ctypes.byref(num_bytes))
    _check(library, "lookup", status)
    return num_bytes.value


def device_fault(device: int) -> None:
    """Raises EngramError if a kernel of an earlier call left a fault on this CUDA device."""
    library = load()
    _check(library, f"cuda:{device}", library.engram_device_fault(device))


def build_info() -> dict[str, Any]:
    """What engram_build_info says: version, abi, git, compiler, cuda, architectures, ..."""
    info: dict[str, Any] = json.loads(load().engram_build_info().decode())
    return info


def read_blocks(
    base: int,
    block_ids: int,
    num_blocks: int,
    block_bytes: int,
    out: int = 0,
    out_bytes_per_block: int = 0,
) -> int:
    """engram_bench_read_blocks on all cores: reads blocks at base + id * block_bytes and fills
    out, where it is given, by so many bytes for each; returns a checksum."""
    library = load()
    checksum = c_uint64()
    _check(
        library,
        "read_blocks",
        library.engram_bench_read_blocks(
            base,
            block_ids,
            num_blocks,
            block_bytes,
            out,
            out_bytes_per_block,
            0,
            ctypes.byref(checksum),
        ),
    )
    return checksum.value


def read_pages(path: str, page_ids: int, num_pages: int) -> None:
    """engram_bench_read_pages: reads pages of 4096 bytes of a file as disk tables are read."""
    library = load()
    status = library.engram_bench_read_pages(_text("read_pages", path), page_ids, num_pages, 0)
    _check(library, "read_pages", status)


def bind_tables(toml: str, folder: str, where: str) -> None:
    """engram_table_bind: every [tables.NAME] of a TOML text, or none."""
    library = load()
    texts = [_text("tables", part) for part in (toml, folder, where)]
    _check(library, "tables", library.engram_table_bind(*texts))


def bind_tables_file(path: str) -> None:
    """engram_table_bind_file: the same for a file."""
    library = load()
    _check(library, "tables", library.engram_table_bind_file(_text("tables", path)))


def check_tables_file(path: str) -> None:
    """engram_table_check_file: the first fault of a file and its stores; binds nothing."""
    library = load()
    _check(library, "tables", library.engram_table_check_file(_text("tables", path)))


def decline_tables(toml: str, folder: str, where: str, reason: str) -> None:
    """engram_table_decline: tells the group of a TOML text why this rank binds nothing; raises what
    all ranks do."""
    library = load()
    texts = [_text("tables", part) for part in (toml, folder, where, reason)]
    _check(library, "tables", library.engram_table_decline(*texts))


def table_progress() -> tuple[int, int]:
    """engram_table_progress: (done, total) bytes of the bind or serve call under way."""
    library = load()
    done, total = c_int64(), c_int64()
    status = library.engram_table_progress(ctypes.byref(done), ctypes.byref(total))
    _check(library, "tables", status)
    return done.value, total.value


def cancel_tables() -> None:
    """engram_table_cancel: the bind call under way fails on all ranks."""
    library = load()
    _check(library, "tables", library.engram_table_cancel())


def unbind_table(name: str) -> None:
    library = load()
    _check(library, "tables", library.engram_table_unbind(_text("tables", name)))


def table_view(name: str, device: int) -> LookupArgs:
    """engram_table_view: the arguments that say what a lookup on a CUDA device reads, which run()
    does in the table where it is on disk."""
    library = load()
    args = TableLookupArgs()
    args.table = _text("tables", name)
    status = library.engram_table_view(args.table, device, ctypes.byref(args))
    _check(library, "tables", status)
    return args if args.values is None else LookupArgs.from_buffer_copy(args)


def table_host_view(name: str) -> TableLookupArgs:
    """engram_table_host_view: the same for a lookup on the CPU, which run() does in the table."""
    library = load()
    args = TableLookupArgs()
    args.table = _text("tables", name)
    _check(library, "tables", library.engram_table_host_view(args.table, ctypes.byref(args)))
    return args


def table_fault(name: str) -> None:
    """Raises EngramError if an earlier lookup could not read rows of this table."""
    library = load()
    _check(library, "tables", library.engram_table_fault(_text("tables", name)))


def describe_tables() -> dict[str, dict[str, Any]]:
    """engram_table_describe: every name's store, layer, fingerprint, ..."""
    described: dict[str, dict[str, Any]] = _read_json(load().engram_table_describe)
    return described


def table_holders(pid: int = 0) -> list[dict[str, Any]]:
    """engram_table_holders: what processes, or one, say of the tables that they hold."""
    library = load()
    holders: list[dict[str, Any]] = _read_json(
        lambda *place: library.engram_table_holders(pid, *place)
    )
    return holders


def launcher_rank() -> int:
    """engram_launcher_rank: this process's among those of its machine."""
    library = load()
    rank = c_int32()
    _check(library, "tables", library.engram_launcher_rank(ctypes.byref(rank)))
    return rank.value


def _read_json(write: Callable[..., int]) -> Any:
    """What a function of tables writes into text[capacity]."""
    size, capacity = c_size_t(0), -1
    buffer = ctypes.create_string_buffer(0)
    while size.value > capacity:  # it may grow between two calls
        capacity = size.value
        buffer = ctypes.create_string_buffer(capacity)
        _check(load(), "tables", write(buffer, capacity, ctypes.byref(size)))
    return json.loads(buffer.value)


def serve_tables(toml: str, folder: str, where: str, name: str, socket: str) -> None:
    """engram_tables_serve: returns after stop_serving() in another thread."""
    library = load()
    texts = [_text("tables", part) for part in (toml, folder, where, name, socket)]
    _check(library, "tables", library.engram_tables_serve(*texts))


def stop_serving() -> None:
    """engram_tables_stop: the serve call of this process ends."""
    library = load()
    _check(library, "tables", library.engram_tables_stop())


def _text(where: str, text: str) -> bytes:
    encoded = os.fsencode(text)  # paths may hold bytes that are no UTF-8
    if b"\0" in encoded:
        raise InputError(f"{where}: expected text without NUL, found {text!r}")
    return encoded


def _check(library: ctypes.CDLL, what: str, status: int) -> None:
    if status == Status.OK:
        return
    text = f"{what}: {library.engram_last_error().decode('utf-8', 'replace')}"
    if status == Status.INVALID_ARGUMENT:
        raise InputError(text)
    raise EngramError(text)
