# SPDX-License-Identifier: Apache-2.0
"""Runs Engram: stores, eager ops, sessions, the command line. Imports load no native library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .group import Group
    from .store import LayerWeights, Store, Table, open_store
    from .tables import Tables

__all__ = ["Group", "LayerWeights", "Store", "Table", "Tables", "open_store"]

# Imported when first asked for: the command line must be able to tell of a Ctrl-C before numpy is
# there.
_MODULES = dict.fromkeys(("LayerWeights", "Store", "Table", "open_store"), "store")
_MODULES |= {"Group": "group", "Tables": "tables"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value
