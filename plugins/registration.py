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
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
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
    trt.get_plugin_registry().load_library(str(library))
    missing = _missing(trt)
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
    require_registered(trt)
    made = plugin_or_none(plugin, trt, values)
    if made is None:
        raise EngramError(f"{plugin}: refused its fields {values}; TensorRT's log says why")
    return made


def require_registered(trt: Any) -> None:
    """register(trt), unless this TensorRT knows the plugins."""
    if _missing(trt) or not plugin_fields():
        register(trt)


def plugin_or_none(plugin: str, trt: Any, values: Mapping[str, FieldValue]) -> Any:
    """create_plugin of registered plugins; None where the creator refused the values."""
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
    return creator.create_plugin(plugin, collection, trt.TensorRTPhase.BUILD)


def _missing(trt: Any) -> list[str]:
    """The plugins that this TensorRT does not know."""
    registry = trt.get_plugin_registry()
    return [
        name for name in plugin_fields() if registry.get_creator(name, VERSION, NAMESPACE) is None
    ]


def field_arrays(plugin: str, values: Mapping[str, FieldValue]) -> dict[str, npt.NDArray[Any]]:
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
        if "\0" in value:  # where the plugin's text would end
            raise InputError(f"{plugin}: {field.name}: expected no zero byte, found {value!r}")
        return np.frombuffer(value.encode() + b"\0", np.int8)
    if field.type == "INT32" and isinstance(value, Integral) and -(2**31) <= int(value) < 2**31:
        return np.array([int(value)], np.int32)
    if field.type == "FLOAT32" and isinstance(value, Real) and not isinstance(value, bool):
        return np.array([float(value)], np.float32)
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
        version = getattr(module, "__version__", None)
        if version is None:  # a folder that is merely called so
            continue
        if int(version.partition(".")[0]) < _OLDEST_MAJOR:
            raise EngramError(
                f"TensorRT: expected version {_OLDEST_MAJOR} or newer, found {version}"
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
