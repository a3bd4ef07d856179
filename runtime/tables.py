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
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from trtllm_engram.builder.layers import table_name
from trtllm_engram.plugins.errors import InputError

from . import _native
from .store import Store

# Held from the first look at the registry's names to the last, where names are told by difference.
_binding = threading.Lock()


class Tables:
    """The tables that this object has bound; close(), or the end of a `with`, frees their names.
    Engines that run keep their tables' memory until they are gone."""

    def __init__(self) -> None:
        self._names: list[str] = []

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Tables:
        """Binds every table of a TOML file, or none."""
        tables = cls()
        with _binding:
            before = set(_native.describe_tables())
            _native.bind_tables_file(os.fspath(path))
            tables._names = [name for name in _native.describe_tables() if name not in before]
        return tables

    @classmethod
    def of_store(cls, store: Store, **options: str) -> Tables:
        """Binds each layer of a store to the name that engines know it by unless told another."""
        tables = cls()
        tables._bind(
            {
                table_name(layer_id): _keys(store, layer_id, options)
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
        checkpoint: str | os.PathLike[str] | None = None,
        expect_content: str | None = None,
    ) -> None:
        """Binds a name to a layer's table; host memory is filled before this returns.

        Args:
            store: a store's folder, or an open store.
            layer: the model's number of the layer.
            placement: "host" (pinned memory that GPUs read in place) or "device".
            scales: "with_rows" or "device".
            checkpoint: where the store's checkpoint lies now, if it was moved.
            expect_content: refuse a table of another content id.
        """
        options: dict[str, Any] = {"placement": placement, "scales": scales}
        if checkpoint is not None:
            options["checkpoint"] = str(Path(checkpoint).absolute())
        if expect_content is not None:
            options["expect_content"] = expect_content
        self._bind({name: _keys(store, layer, options)})

    def unbind(self, name: str) -> None:
        """Frees one name of this object's."""
        if name not in self._names:
            known = ", ".join(self._names) or "none"
            raise InputError(f"table {name!r}: expected a name bound here, found {known}")
        _native.unbind_table(name)
        self._names.remove(name)

    def close(self) -> None:
        """Frees all names. Repeating it does no harm."""
        while self._names:
            _native.unbind_table(self._names[-1])
            self._names.pop()

    def describe(self) -> dict[str, dict[str, Any]]:
        """What each name of this object's is: store, layer, fingerprint, content_id, num_rows,
        num_columns, head_dim, placement, scales."""
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

    def _bind(self, tables: dict[str, dict[str, Any]]) -> None:
        with _binding:
            _native.bind_tables(_to_toml(tables), str(Path.cwd()), "Tables.bind")
            self._names.extend(tables)


def describe_tables() -> dict[str, dict[str, Any]]:
    """Every table of the process; see Tables.describe."""
    return _native.describe_tables()


def _keys(
    store: str | os.PathLike[str] | Store, layer: int, options: dict[str, Any]
) -> dict[str, Any]:
    """The keys of [tables.NAME]."""
    keys: dict[str, Any] = {"layer": layer, **options}
    if isinstance(store, Store):
        if store.manifest.checkpoint is not None:
            keys.setdefault("checkpoint", str(store.manifest.checkpoint.absolute()))
        store = store.path
    return {"store": str(Path(store).absolute()), **keys}


def _to_toml(tables: dict[str, dict[str, Any]]) -> str:
    lines: list[str] = ["format_version = 1"]
    for name, keys in tables.items():
        lines.append(f"[tables.{_quote(name)}]")
        lines.extend(_line(key, value) for key, value in keys.items())
    return "\n".join(lines)


def _line(key: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{key} = {value}"
    if isinstance(value, str):
        return f"{key} = {_quote(value)}"
    raise InputError(f"{key}: expected text or an integer, found {value!r}")


def _quote(text: str) -> str:
    """A TOML basic string: JSON's, save that DEL is escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
