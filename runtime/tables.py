# SPDX-License-Identifier: Apache-2.0
"""Tables by name: what engines look up at run time.

    with Tables() as tables:
        tables.bind("engram_1", "store", layer=1)
        tables.bind("engram_14", "store", layer=14, placement="device")
        ...  # run engines

Names belong to the process: one registry in the library serves Python, every engine and every
thread. TRTLLM_ENGRAM_TABLES=file.toml binds them in processes with no Python; its form:

    format_version = 1
    [tables.engram_1]
    store = "store"          # relative to the file
    layer = 1
    placement = "device"

The processes of a node share host tables: all bind at the same time, as group.py's Group or their
launcher's variables say, and whatever fails on one of them fails on all.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from trtllm_engram.builder.block_sums import Progress
from trtllm_engram.builder.layers import table_name
from trtllm_engram.plugins.errors import EngramError, InputError

from . import _native
from .arrays import Array
from .call import Call
from .cancellable import run_cancellable
from .group import Group
from .lookup_call import ScaleOrder, mxfp8_outputs, take_ids, to_bf16, to_mxfp8, to_packed
from .store import Store

# Held from the first look at the registry's names to the last, where names are told by difference.
_binding = threading.Lock()


class Tables:
    """The tables that this object has bound; close(), or the end of a `with`, frees their names.
    Engines that run keep their tables' memory until they are gone.

    Args:
        group: the processes that share the tables; default: as the launcher's variables say.
        progress: called with the bytes that all ranks have loaded and those that there are.
    """

    def __init__(self, group: Group | None = None, progress: Progress | None = None) -> None:
        self._group = group
        self._progress = progress
        self._names: list[str] = []

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], *, progress: Progress | None = None) -> Tables:
        """Binds every table of a TOML file, whose [group] says who shares them, or none."""
        tables = cls(progress=progress)
        tables._load(lambda: _native.bind_tables_file(os.fspath(path)), None)
        return tables

    @classmethod
    def of_store(
        cls,
        store: Store,
        *,
        group: Group | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Tables:
        """Binds each layer of a store to the name that engines know it by unless told another.
        `options` are bind's."""
        tables = cls(group, progress)
        tables.bind_all(
            {
                table_name(layer_id): {"store": store, "layer": layer_id, **options}
                for layer_id in store.config.layer_ids
            }
        )
        return tables

    def bind(
        self,
        name: str,
        store: str | os.PathLike[str] | Store,
        *,
        layer: int,
        placement: str = "host",
        scales: str = "with_rows",
        hot_gib: float | None = None,
        hot_rows: str | os.PathLike[str] | None = None,
        hot_adaptive: float | None = None,
        gather_threads: int | None = None,
        memory: str | None = None,
        pages: str | None = None,
        numa: str | None = None,
        verify: bool | None = None,
        formula_seed: int | None = None,
        heads: bool | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        expect_content: str | None = None,
    ) -> None:
        """Binds a name to a layer's table; host memory is filled before this returns. All ranks of
        the group call this together; a failure or Ctrl-C on one is an error on all.

        Args:
            store: a store's folder, or an open store.
            layer: the model's number of the layer.
            placement: "host" (pinned memory that GPUs read in place), "device",
                "device_sharded" (each rank's GPU holds a part, all read all) or "disk" (rows are
                read from the store's files as they are asked for).
            scales: "with_rows", "device" or, of "disk" tables, "host": all in RAM.
            hot_gib: of "disk" tables: GiB of RAM for rows that were read before (default: 1); of
                "host" tables: GiB of each GPU's memory for rows that were read before and those
                of hot_rows (default: 1 with hot_rows, none without).
            hot_rows: of "host" tables: a file of `tables count --output`; GPUs hold the rows read
                most, as many as hot_gib has room for.
            hot_adaptive: of hot_rows: the share of hot_gib for rows that were read before
                (default: 0).
            gather_threads: of "host" tables: CPU threads that bring rows to this process's GPUs,
                where a lookup has enough of them; 0: GPUs read all rows themselves (default: the
                process's share of the CPUs less one, or 0 where that is below 6). All tables have
                the threads of the first one that is looked up in.
            memory: of host tables: "memfd" (default), "shm", "cumem", "private", or "keeper": what
                a process of `tables serve` holds.
            pages: "auto" (default), "4k" or "2m" (reserved huge pages).
            numa: "default", "local", "interleave", "node:N" or "gpu" (a copy on each GPU's node;
                not of a keeper, which holds one for all GPUs).
            verify: check the bytes that are loaded against the store's sums.
            formula_seed: fill the table by the formula of `synthesize` instead of from files.
            heads: this rank of the group reads a part of the hash columns alone, those that other
                engines' checkpoint loaders give it: lookups take the ids of num_columns columns
                from first_column on (see describe), and the ranks' rows side by side, in the order
                of ranks, are the table's. A "device" table then holds the rows of these alone.
            checkpoint: where the store's checkpoint lies now, if it was moved.
            expect_content: refuse a table of another content id.
        """
        options = {
            "placement": placement,
            "scales": scales,
            "hot_gib": hot_gib,
            "hot_rows": hot_rows,
            "hot_adaptive": hot_adaptive,
            "gather_threads": gather_threads,
            "memory": memory,
            "pages": pages,
            "numa": numa,
            "verify": verify,
            "formula_seed": formula_seed,
            "heads": heads,
            "checkpoint": checkpoint,
            "expect_content": expect_content,
        }
        self.bind_all({name: {"store": store, "layer": layer, **options}})

    def bind_all(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """Binds several names at once, or none: bind's arguments by name. Ranks that share more
        than one table meet once for all."""
        try:
            text = to_toml(tables, self._group)
        except Exception as error:
            self.decline(str(error))
            raise
        self._load(lambda: _native.bind_tables(text, str(Path.cwd()), ""), list(tables))

    def decline(self, reason: str) -> None:
        """Tells the group, in place of bind, why this process binds nothing; else the others would
        wait for it. Returns once all have come and raised that, or their time is over."""
        text = to_toml({}, self._group)
        with contextlib.suppress(EngramError, InputError):  # what the others raise
            run_cancellable(lambda: _native.decline_tables(text, str(Path.cwd()), "", reason))

    def unbind(self, name: str) -> None:
        """Frees one name of this object's."""
        self._check_own(name)
        _native.unbind_table(name)
        self._names.remove(name)

    def close(self) -> None:
        """Frees all names. Repeating it does no harm."""
        while self._names:
            _native.unbind_table(self._names[-1])
            self._names.pop()

    def lookup(self, name: str, ids: Array, *, out: Array | None = None, stream: Any = None) -> Any:
        """ops.lookup in a table of this object's: on the GPU where the ids are or, where they are
        in host memory, on the CPU, which rows in GPU memory are refused to. Rows on disk that
        cannot be read are NaN: the table's next lookup, or raise_fault, is an EngramError. A
        captured lookup in rows on disk keeps its table until the graph is gone."""
        call = Call("lookup", stream, ids=ids, out=out)
        return to_bf16(call, self._args(name, call))

    def lookup_packed(
        self, name: str, ids: Array, *, out: Array | None = None, stream: Any = None
    ) -> Any:
        """ops.lookup_packed in a table of this object's; see lookup."""
        call = Call("lookup_packed", stream, ids=ids, out=out)
        return to_packed(call, self._args(name, call))

    def lookup_mxfp8(
        self,
        name: str,
        ids: Array,
        *,
        scale_order: ScaleOrder = "linear",
        out: tuple[Array, Array] | None = None,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """ops.lookup_mxfp8 in a table of this object's; see lookup."""
        outs = mxfp8_outputs("lookup_mxfp8", scale_order, out)
        call = Call("lookup_mxfp8", stream, ids=ids, **outs)
        return to_mxfp8(call, self._args(name, call), scale_order)

    def raise_fault(self, name: str) -> None:
        """EngramError, with file and offset, if an earlier lookup could not read rows on disk."""
        self._check_own(name)
        _native.table_fault(name)

    def describe(self) -> dict[str, dict[str, Any]]:
        """What each name of this object's is: store, layer, fingerprint, content_id, num_rows,
        first_column, num_columns, head_dim, placement, scales, and what this rank has of it:
        memory, pages, numa, num_bytes, huge_bytes, rank, size, keeper, since, load_seconds,
        registered_seconds, disk, hot (engram.h says of each what it is)."""
        everything = describe_tables()
        return {name: everything[name] for name in self._names if name in everything}

    def __enter__(self) -> Tables:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _args(self, name: str, call: Call) -> _native.LookupArgs:
        """What a call reads of a table."""
        self._check_own(name)
        if call.device == _native.CPU:
            return take_ids(call, _native.table_host_view(name))
        return take_ids(call, _native.table_view(name, call.device))

    def _check_own(self, name: str) -> None:
        if name not in self._names:
            known = ", ".join(self._names) or "none"
            raise InputError(f"table {name!r}: expected a name bound here, found {known}")

    def _load(self, bind: Callable[[], None], names: Sequence[str] | None) -> None:
        """names: those that it binds; None: whatever is new then."""
        with _binding:
            before = set(_native.describe_tables())

            def new_names() -> list[str]:
                new = [name for name in _native.describe_tables() if name not in before]
                return new if names is None else [name for name in new if name in names]

            try:
                run_cancellable(bind, lambda: report_progress(self._progress))
            except BaseException:
                for name in new_names():  # interrupted just as all was done
                    _native.unbind_table(name)
                raise
            self._names.extend(new_names())


def describe_tables() -> dict[str, dict[str, Any]]:
    """Every table of the process; see Tables.describe."""
    return _native.describe_tables()


def report_progress(progress: Progress | None) -> None:
    """Hands on how far the loading under way is, once it has begun."""
    if progress is not None:
        done, total = _native.table_progress()
        if total > 0:
            progress(done, total)


def to_toml(tables: Mapping[str, Mapping[str, Any]], group: Group | None) -> str:
    """The TOML text of tables by name, each with bind's arguments."""
    lines: list[str] = ["format_version = 1"]
    if group is not None:
        lines.append("[group]")
        lines.extend(_line(key, value) for key, value in group.keys().items())
    for name, arguments in tables.items():
        lines.append(f"[tables.{_quote(name)}]")
        lines.extend(_line(key, value) for key, value in _keys(**arguments).items())
    return "\n".join(lines)


def _keys(*, store: str | os.PathLike[str] | Store, layer: int, **options: Any) -> dict[str, Any]:
    """The keys of [tables.NAME] that bind's arguments are; what is None is left out."""
    keys = {key: value for key, value in options.items() if value is not None}
    if isinstance(store, Store):
        if store.manifest.checkpoint is not None:
            keys.setdefault("checkpoint", store.manifest.checkpoint)
        store = store.path
    for key in ("checkpoint", "hot_rows"):
        if key in keys:
            keys[key] = str(Path(keys[key]).absolute())
    return {"store": str(Path(store).absolute()), "layer": layer, **keys}


def _line(key: str, value: object) -> str:
    if isinstance(value, bool):
        return f"{key} = {'true' if value else 'false'}"
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return f"{key} = {value}"
    if isinstance(value, str):
        return f"{key} = {_quote(value)}"
    raise InputError(f"{key}: expected text or a number, found {value!r}")


def _quote(text: str) -> str:
    """A TOML basic string: JSON's, save that DEL is escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
