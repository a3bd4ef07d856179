# SPDX-License-Identifier: Apache-2.0
"""Run by test_plugins_registry.py in a process of its own: brings the plugins into a TensorRT in
one of several ways, does one thing with them, and prints JSON.

usage: plugin_probe.py WAY ACTION MODULE, of TensorRT's bindings
"""

from __future__ import annotations

import ctypes
import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from trtllm_engram.plugins import library_path, registration
from trtllm_engram.plugins.errors import EngramError, InputError

_ROWS = {"table": "engram.1", "fingerprint": "a" * 64, "layer": 1, "layer_idx": 0, "head_dim": 256}
RIGHT: dict[str, dict[str, Any]] = {
    "EngramHash": {"pad_token_id": 2, "history": "explicit"},
    "EngramLookup": _ROWS,
    "EngramPrefetch": _ROWS,
    "EngramProject": {"weight_layout": "row_major"},
    "EngramGate": {"eps": 1e-6},
}


def bring(way: str, library: str, module: str) -> Any:
    if way == "dlopen_first":
        ctypes.CDLL(library)
    trt = importlib.import_module(module)
    registry = trt.get_plugin_registry()
    if way in ("dlopen", "dlopen_and_load", "load_and_dlopen"):
        if way == "load_and_dlopen":
            registry.load_library(library)
        ctypes.CDLL(library)
    if way in ("load", "dlopen_and_load", "load_twice"):
        registry.load_library(library)
    if way == "load_twice":
        registry.load_library(library)
    if way == "register":
        registration.register(trt)
        registration.register(trt)
    if way == "dlopen_first" and ctypes.CDLL(library).engram_register_plugins() != 0:
        raise SystemExit("engram_register_plugins failed")
    return trt


def creators(trt: Any) -> Any:
    found = trt.get_plugin_registry().all_creators
    return sorted(
        (creator.name, creator.plugin_version, creator.plugin_namespace)
        for creator in found
        if creator.name.startswith("Engram")
    )


def fields(trt: Any) -> Any:
    registry = trt.get_plugin_registry()
    return {
        name: {
            field.name: field.type.name for field in registry.get_creator(name, "1", "").field_names
        }
        for name in RIGHT
    }


def create(trt: Any) -> Any:
    """Capabilities of plugins made through registration.create_plugin."""
    capabilities = trt.PluginCapabilityType
    made = {}
    for name, values in RIGHT.items():
        plugin = registration.create_plugin(name, trt, **values)
        made[name] = [
            plugin.get_capability_interface(capability) is not None
            for capability in (capabilities.CORE, capabilities.BUILD, capabilities.RUNTIME)
        ]
    return made


def refuse(trt: Any) -> Any:
    """What wrong fields say: through Python's own checks, and from a creator asked directly."""
    texts = []
    for values in ({}, {"eps": "1"}, {"eps": 1, "epsilon": 1}, {"eps": 1.0, "in_place": 2}):
        try:
            registration.create_plugin("EngramGate", trt, **values)
        except (InputError, EngramError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    creator = trt.get_plugin_registry().get_creator("EngramGate", "1", "")
    nothing = trt.PluginFieldCollection([])
    for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME):
        texts.append(f"{phase.name}: {creator.create_plugin('gate', nothing, phase) is not None}")
    return texts


def second_copy(trt: Any) -> Any:
    """A copy of the library under another name: it registers nothing and binds nothing."""
    before = creators(trt)
    with tempfile.TemporaryDirectory() as folder:
        copy = str(shutil.copy(library_path(), Path(folder, "copy.so")))
        second = ctypes.CDLL(copy)
        trt.get_plugin_registry().load_library(copy)
        second.engram_last_error.restype = ctypes.c_char_p
        return {
            "copy": copy,
            "creators_unchanged": creators(trt) == before,
            "first": [
                ctypes.CDLL(str(library_path())).engram_copy_is_first(),
                second.engram_copy_is_first(),
            ],
            "register": second.engram_register_plugins(),
            "bind": second.engram_table_bind(b"format_version = 1", b".", b"test"),
            "text": second.engram_last_error().decode(),
        }


def main(way: str, action: str, module: str) -> None:
    trt = bring(way, str(library_path()), module)
    result = {
        "creators": creators,
        "fields": fields,
        "create": create,
        "refuse": refuse,
        "second_copy": second_copy,
    }[action](trt)
    print(json.dumps({"version": trt.__version__, "result": result}))


if __name__ == "__main__":
    main(*sys.argv[1:])
