# SPDX-License-Identifier: Apache-2.0
"""Registers the library's plugins with TensorRT and makes plugins of named, checked fields.

TensorRT itself is optional: `trt` is the module `tensorrt` (or `tensorrt_bindings`), imported here
where it is not given.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.plugins import library_path, open_library
from trtllm_engram.plugins.errors import EngramError, InputError

VERSION = "1"
NAMESPACE = ""
TENSORRT_MODULES = ("tensorrt", "tensorrt_bindings")
_OLDEST_MAJOR = 10  # whose plugins are V3

FieldValue = int | float | str


@dataclass(frozen=True)
class Field:
    """A creator field. default is None where a value is required."""

    name: str
    type: str  # INT32, FLOAT32 or CHAR
    default: FieldValue | None
    doc: str

    @property
    def required(self) -> bool:
        return self.default is None


@functools.cache
def plugin_fields() -> dict[str, dict[str, Field]]:
    """The fields of each plugin, as the library declares them; empty for a CPU-only library."""
    text = _library().engram_plugin_fields()
    return {
        plugin: {
            name: Field(name, entry["type"], entry.get("default"), entry["doc"])
            for name, entry in declared["fields"].items()
        }
        for plugin, declared in json.loads(text).items()
    }


def register(trt: Any = None, path: str | os.PathLike[str] | None = None) -> None:
    """Makes the plugins known to the TensorRT of this process. Repeating it does no harm.

    Args:
        trt: the TensorRT module.
        path: the library, where it is not the package's own.

    Raises:
        EngramError: TensorRT refused, for instance because another copy of the library was first.
    """
    trt = trt or import_tensorrt()
    library = Path(path or library_path())
    registry = trt.get_plugin_registry()
    registry.load_library(str(library))
    missing = [
        name for name in plugin_fields() if registry.get_creator(name, VERSION, NAMESPACE) is None
    ]
    if missing or not plugin_fields():
        raise EngramError(
            f"{library}: expected TensorRT {trt.__version__} to register its plugins, found it "
            f"without {', '.join(missing) or 'any in this CPU-only library'}; its log says why"
        )


def create_plugin(plugin: str, trt: Any = None, **values: FieldValue) -> Any:
    """An IPluginV3 for INetworkDefinition.add_plugin_v3.

    Raises:
        InputError: an unknown plugin or field, a missing field, or a value of another type.
        EngramError: the creator refused the values; TensorRT's log says why.
    """
    trt = trt or import_tensorrt()
    arrays = field_arrays(plugin, values)  # referenced until the creator has read them
    fields = plugin_fields()[plugin]
    types = trt.PluginFieldType
    collection = trt.PluginFieldCollection(
        [
            trt.PluginField(name, array, getattr(types, fields[name].type))
            for name, array in arrays.items()
        ]
    )
    creator = trt.get_plugin_registry().get_creator(plugin, VERSION, NAMESPACE)
    if creator is None:
        raise EngramError(
            f"{plugin}: expected a registered plugin, found none; call register() first"
        )
    made = creator.create_plugin(plugin, collection, trt.TensorRTPhase.BUILD)
    if made is None:
        raise EngramError(f"{plugin}: refused its fields {values}; TensorRT's log says why")
    return made


def field_arrays(plugin: str, values: dict[str, FieldValue]) -> dict[str, npt.NDArray[Any]]:
    """Values as the arrays that a PluginField takes, checked against the declared fields."""
    if plugin not in plugin_fields():
        raise InputError(f"plugin: expected one of {', '.join(plugin_fields())}; found {plugin!r}")
    fields = plugin_fields()[plugin]
    for name in values:
        if name not in fields:
            raise InputError(f"{plugin}: expected fields of {', '.join(fields)}; found {name!r}")
    for field in fields.values():
        if field.required and field.name not in values:
            raise InputError(f"{plugin}: {field.name}: expected a value, found none ({field.doc})")
    return {name: _array(plugin, fields[name], value) for name, value in values.items()}


def _array(plugin: str, field: Field, value: FieldValue) -> npt.NDArray[Any]:
    if field.type == "CHAR" and isinstance(value, str):
        return np.frombuffer(value.encode() + b"\0", np.int8)
    if field.type == "INT32" and isinstance(value, int) and -(2**31) <= value < 2**31:
        return np.array([value], np.int32)
    if field.type == "FLOAT32" and isinstance(value, int | float) and not isinstance(value, bool):
        return np.array([value], np.float32)
    raise InputError(f"{plugin}: {field.name}: expected {field.type}, found {value!r}")


def import_tensorrt() -> Any:
    """The module `tensorrt`, or the bindings alone.

    Raises:
        EngramError: neither is there, does not load, or is older than 10.
    """
    for name in TENSORRT_MODULES:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError) as error:  # bindings may be there, but not libnvinfer
            if isinstance(error, ModuleNotFoundError) and error.name == name:
                continue
            reason = " ".join(str(error).split())
            raise EngramError(
                f"TensorRT: expected the Python package {name} to load, found: {reason}"
            ) from error
        if int(module.__version__.partition(".")[0]) < _OLDEST_MAJOR:
            raise EngramError(
                f"TensorRT: expected version {_OLDEST_MAJOR} or newer, found {module.__version__}"
            )
        return module
    raise EngramError(
        "TensorRT: expected the Python package tensorrt, found none; pip install tensorrt"
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = open_library(str(library_path()))
    library.engram_plugin_fields.restype = ctypes.c_char_p
    return library
