# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules, read and made with ctypes alone (https://dmlc.github.io/dlpack/latest/)."""

from __future__ import annotations

import ctypes
from ctypes import (
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, NamedTuple

CPU = 1
CUDA = 2
CUDA_HOST = 3
CUDA_MANAGED = 13

_DTYPES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (14, 8): "float8_e8m0fnu",
}
_CODES = {name: code for code, name in _DTYPES.items()}
_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", c_void_p), ("deleter", c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    ]


def _python_api(name: str, result: Any, *arguments: Any) -> Any:
    # A prototype of our own: ctypes.pythonapi's functions are shared with all users of ctypes.
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


# c_void_p for the capsule in a destructor: py_object would take references to a dying object.
_Destructor = ctypes.PYFUNCTYPE(None, c_void_p)
_Deleter = ctypes.CFUNCTYPE(None, c_void_p)
_capsule_name = _python_api("PyCapsule_GetName", c_char_p, ctypes.py_object)
_capsule_pointer = _python_api("PyCapsule_GetPointer", c_void_p, ctypes.py_object, c_char_p)
_capsule_new = _python_api("PyCapsule_New", ctypes.py_object, c_void_p, c_char_p, _Destructor)
_dying_is_valid = _python_api("PyCapsule_IsValid", c_int, c_void_p, c_char_p)
_dying_pointer = _python_api("PyCapsule_GetPointer", c_void_p, c_void_p, c_char_p)


class Imported(NamedTuple):
    """What a capsule describes. The memory lives as long as the capsule, never marked as used."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    dtype: str
    device_type: int
    device_id: int
    read_only: bool
    capsule: object


def contiguous_strides(shape: tuple[int, ...], step: int) -> tuple[int, ...]:
    """Strides of an array in C order without gaps whose last axis has stride `step`."""
    strides = [step]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def read(array: Any, stream: int | None) -> Imported:
    """Exports `array` for work on `stream` (None for host memory) and reads the capsule."""
    try:
        capsule = array.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # a producer from before DLPack 1.0
        capsule = array.__dlpack__(stream=stream)
    name = _capsule_name(capsule)
    kind = _ManagedVersioned if name == b"dltensor_versioned" else _Managed
    managed = kind.from_address(_capsule_pointer(capsule, name))
    tensor = managed.tensor
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        strides = tuple(stride * tensor.bits // 8 for stride in tensor.strides[: tensor.ndim])
    else:  # DLPack's way to say contiguous
        strides = contiguous_strides(shape, tensor.bits // 8)
    dtype = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    return Imported(
        pointer=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        dtype=dtype or f"dlpack({tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes)",
        device_type=tensor.device_type,
        device_id=tensor.device_id,
        read_only=bool(getattr(managed, "flags", 0) & _READ_ONLY),
        capsule=capsule,
    )


# What each exported tensor needs alive, by the address that its deleter is given.
_exported: dict[int, tuple[object, ...]] = {}


def _release(address: int) -> None:
    _exported.pop(address, None)


def _destroy(capsule: int) -> None:
    # A consumer renames the capsule that it takes over, and calls the deleter itself.
    if _dying_is_valid(capsule, b"dltensor"):
        _release(_dying_pointer(capsule, b"dltensor"))


# Kept here because C holds their addresses.
_release_callback = _Deleter(_release)
_destroy_callback = _Destructor(_destroy)


def export(
    owner: object,
    pointer: int,
    shape: tuple[int, ...],
    dtype: str,
    device: int = 0,
    device_type: int = CUDA,
) -> object:
    """A capsule of contiguous memory that keeps `owner` alive."""
    dims = (c_int64 * len(shape))(*shape)
    strides = (c_int64 * len(shape))(*contiguous_strides(shape, 1))
    managed = _Managed()
    tensor = managed.tensor
    tensor.data = pointer
    tensor.device_type, tensor.device_id = device_type, device
    tensor.ndim = len(shape)
    tensor.code, tensor.bits = _CODES[dtype]
    tensor.lanes = 1
    tensor.shape = ctypes.cast(dims, ctypes.POINTER(c_int64))
    tensor.strides = ctypes.cast(strides, ctypes.POINTER(c_int64))
    managed.deleter = ctypes.cast(_release_callback, c_void_p)
    address = ctypes.addressof(managed)
    _exported[address] = (managed, dims, strides, owner)
    return _capsule_new(address, b"dltensor", _destroy_callback)
