# SPDX-License-Identifier: Apache-2.0
"""Arrays of every kind as pointers.

numpy arrays, torch tensors, DLPack producers (CuPy, JAX, DeviceArray) and objects with
__cuda_array_interface__ (Numba) are read in place. torch and cuda-python are optional: neither is
imported before an array asks for it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.plugins.errors import InputError

from . import _native, dlpack
from .device_array import LEGACY_STREAM, cuda, wait

Array = Any  # whatever `view` accepts
Dtypes = tuple[str, ...]
Shape = tuple[int | None, ...]  # None: any size

BF16: Dtypes = ("bfloat16", "uint16")
FP8: Dtypes = ("float8_e4m3fn", "uint8")
E8M0: Dtypes = ("float8_e8m0fnu", "uint8")
BOOL: Dtypes = ("bool", "uint8")
UINT8: Dtypes = ("uint8",)
INT32: Dtypes = ("int32",)
POSITION: Dtypes = ("int64", "int32")
HIDDEN: Dtypes = ("bfloat16", "uint16", "float16", "float32")

_ITEM_BYTES = {"float32": 4, "int32": 4, "int64": 8, "bfloat16": 2, "float16": 2, "uint16": 2}


_CACHE_LINE = 64


def aligned_empty(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A new numpy array that starts a cache line, as tables in host memory do. A large one of
    numpy's own never does, and writing lines to it takes longer."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _CACHE_LINE, np.uint8)
    begin = -memory.ctypes.data % _CACHE_LINE
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Where an array lies. Strides are in bytes; `array` and `keep` keep the memory alive."""

    array: Array
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str  # numpy's and torch's name, such as bfloat16 or float8_e4m3fn
    device: int  # _native.CPU or a CUDA ordinal
    read_only: bool = False
    keep: object = None

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES.get(self.dtype, 1)

    def is_contiguous(self, first_axis: int = 0) -> bool:
        """Whether the axes from `first_axis` on lie in C order without gaps."""
        if 0 in self.shape:
            return True
        step = self.item_bytes
        for size, stride in reversed(list(zip(self.shape, self.strides, strict=True))[first_axis:]):
            if size > 1 and stride != step:
                return False
            step *= size
        return True


def torch_of(arrays: list[Array]) -> Any:
    """The module torch if one of the arrays is a tensor, else None; never imports it."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    return torch if tensor and any(isinstance(array, tensor) for array in arrays) else None


def view(where: str, array: Array, stream: int) -> View:
    """Reads an array in place, for work on `stream`; `where` begins the text of errors."""
    if isinstance(array, np.ndarray):
        return _numpy_view(array)
    if torch_of([array]):
        return _torch_view(where, array)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _dlpack_view(where, array, stream)
    if hasattr(array, "__cuda_array_interface__"):
        return _interface_view(array, stream)
    raise InputError(
        f"{where}: expected a numpy array, a torch tensor, or an array with __dlpack__ or "
        f"__cuda_array_interface__, found {type(array).__name__}"
    )


def device_name(device: int) -> str:
    return "cpu" if device == _native.CPU else f"cuda:{device}"


def _numpy_view(array: Any) -> View:
    return View(
        array=array,
        pointer=array.ctypes.data,
        shape=array.shape,
        strides=array.strides,
        # A dtype's name hides its byte order, str ('>i4') shows it.
        dtype=array.dtype.name if array.dtype.isnative else array.dtype.str,
        device=_native.CPU,
        read_only=not array.flags.writeable,
    )


def _torch_view(where: str, tensor: Any) -> View:
    if tensor.device.type not in ("cpu", "cuda"):
        raise InputError(f"{where}: expected on cpu or cuda, found on {tensor.device}")
    size = tensor.element_size()
    return View(
        array=tensor,
        pointer=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * size for stride in tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=tensor.device.index if tensor.device.type == "cuda" else _native.CPU,
    )


def _dlpack_view(where: str, array: Array, stream: int) -> View:
    device_type = int(array.__dlpack_device__()[0])
    on_cuda = device_type in (dlpack.CUDA, dlpack.CUDA_MANAGED)
    if not on_cuda and device_type not in (dlpack.CPU, dlpack.CUDA_HOST):
        raise InputError(f"{where}: expected on cpu or cuda, found DLPack device {device_type}")
    found = dlpack.read(array, (stream or LEGACY_STREAM) if on_cuda else None)
    return View(
        array=array,
        pointer=found.pointer,
        shape=found.shape,
        strides=found.strides,
        dtype=found.dtype,
        device=found.device_id if on_cuda else _native.CPU,
        read_only=found.read_only,
        keep=found.capsule,
    )


def _interface_view(array: Array, stream: int) -> View:
    interface = array.__cuda_array_interface__
    pointer, read_only = interface["data"]
    shape = tuple(interface["shape"])
    dtype = np.dtype(interface["typestr"])
    device = int(
        cuda("cudaPointerGetAttributes", pointer).device if pointer else cuda("cudaGetDevice")
    )
    producer = interface.get("stream")
    if producer is not None:
        wait(stream, producer, device)
    strides = interface.get("strides") or dlpack.contiguous_strides(shape, dtype.itemsize)
    return View(
        array=array,
        pointer=pointer,
        shape=shape,
        strides=tuple(strides),
        dtype=dtype.name,
        device=device,
        read_only=read_only,
    )
