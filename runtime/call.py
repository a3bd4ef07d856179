# SPDX-License-Identifier: Apache-2.0
"""One call of an op: arguments checked, stream chosen, results of the same kind as the inputs."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_engram.plugins.errors import InputError

from . import _native
from .arrays import Array, Dtypes, Shape, View, aligned_empty, device_name, torch_of, view
from .device_array import DeviceArray, is_capturing, stream_memory
from .row import SCALE_BLOCK

_NUMPY_DTYPES: dict[str, npt.DTypeLike] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "int32": np.int32,
    "int64": np.int64,
    "bool": np.bool_,
    "uint8": np.uint8,
}


class Result(NamedTuple):
    array: Array
    pointer: int


# GPU copies by content, kind and device. Never freed: captured graphs hold their addresses.
_constants: dict[tuple[bytes, str, int], Result] = {}
_constants_lock = threading.Lock()


class Call:
    """The arrays of one call, all on one device. ops.py says which kind of results they make."""

    # Positional: an engine's tensors may have any name, `stream` too.
    def __init__(self, op: str, stream: Any, /, **arrays: Array) -> None:
        given = {name: array for name, array in arrays.items() if array is not None}
        self.op = op
        self._torch = torch_of(list(given.values()))
        self._explicit_stream = stream
        self._stream = self._choose_stream(given)
        self._views = {
            name: view(f"{op}: {name}", array, self._stream) for name, array in given.items()
        }
        self.device = self._common_device()

    @property
    def kind(self) -> str:
        """What the results are: torch, numpy or device."""
        if self._torch is not None:
            return "torch"
        return "numpy" if self.device == _native.CPU else "device"

    @property
    def stream(self) -> int:
        """cudaStream_t that the call's work goes to; 0 is the legacy default stream."""
        return self._stream

    def input(self, name: str, dtypes: Dtypes, shape: Shape, strided: bool = False) -> View:
        """The array of that name: contiguous, with `strided` only from its second axis on."""
        where = f"{self.op}: {name}"
        found = self._views.get(name)
        if found is None:
            raise InputError(f"{where}: expected {_describe(dtypes, shape)}, found None")
        fits = len(found.shape) == len(shape) and all(
            size in (None, actual) for size, actual in zip(shape, found.shape, strict=True)
        )
        if found.dtype not in dtypes or not fits:
            raise InputError(
                f"{where}: expected {_describe(dtypes, shape)}, "
                f"found {_describe((found.dtype,), found.shape)}"
            )
        if not found.is_contiguous(first_axis=1 if strided else 0):
            raise InputError(
                f"{where}: expected a contiguous array, found shape {list(found.shape)} with "
                f"strides of {list(found.strides)} bytes"
            )
        if found.pointer % found.item_bytes:
            raise InputError(
                f"{where}: expected {found.dtype} aligned to {found.item_bytes} bytes, "
                f"found address {found.pointer:#x}"
            )
        return found

    def optional(self, name: str, dtypes: Dtypes, shape: Shape) -> int | None:
        """Pointer of the array of that name, None where none was given."""
        return self.input(name, dtypes, shape).pointer if name in self._views else None

    def output(self, name: str, dtypes: Dtypes, shape: tuple[int, ...]) -> int | None:
        """Like `optional`, for an array that the op writes."""
        if name not in self._views:
            return None
        found = self.input(name, dtypes, shape)
        if found.read_only:
            raise InputError(f"{self.op}: {name}: expected a writable array, found a read-only one")
        return found.pointer

    def result(self, name: str, dtypes: Dtypes, shape: tuple[int, ...]) -> Result:
        """The caller's array of that name, or a new one of the first dtype."""
        pointer = self.output(name, dtypes, shape)
        if pointer is not None:
            return Result(self._views[name].array, pointer)
        if self._torch is not None:
            dtype = getattr(self._torch, dtypes[0])
            with self._torch_stream():
                tensor = self._torch.empty(shape, dtype=dtype, device=device_name(self.device))
            return Result(tensor, tensor.data_ptr())
        numpy_dtype = _NUMPY_DTYPES[dtypes[0]]
        if self.device == _native.CPU:
            array = aligned_empty(shape, numpy_dtype)
            return Result(array, array.ctypes.data)
        made = DeviceArray(shape, numpy_dtype, self.device, self._stream, self._explicit_stream)
        return Result(made, made.pointer)

    @contextlib.contextmanager
    def scratch(self, num_bytes: int) -> Iterator[int | None]:
        """GPU memory for what runs on the call's stream inside; under capture the graph's own.
        None for no bytes."""
        if num_bytes == 0:
            yield None
        elif self._torch is not None:
            with self._torch_stream():
                dtype = self._torch.uint8
                tensor = self._torch.empty(num_bytes, dtype=dtype, device=device_name(self.device))
            yield tensor.data_ptr()
        else:
            with stream_memory(num_bytes, self.device, self._stream) as pointer:
                yield pointer

    def constant(self, host: npt.NDArray[Any]) -> int:
        """Pointer to a copy of a small array on this call's GPU, made once per content."""
        key = (host.tobytes(), self.kind, self.device)
        with _constants_lock:
            if key not in _constants:
                _constants[key] = self._upload(host)
            return _constants[key].pointer

    def run(self, args: _native.OpArgs) -> None:
        _native.run(
            self.op, args, _native.Exec(device=self.device, num_threads=0, stream=self._stream)
        )

    def _upload(self, host: npt.NDArray[Any]) -> Result:
        """A copy on the GPU, complete on return and so for use on any stream."""
        if self._is_capturing():
            raise InputError(
                f"{self.op}: expected an earlier call with this layout on "
                f"{device_name(self.device)}, before the stream's capture began, found none"
            )
        if self._torch is not None:
            tensor = self._torch.tensor(host, device=device_name(self.device))
            self._torch.cuda.current_stream(self.device).synchronize()
            return Result(tensor, tensor.data_ptr())
        made = DeviceArray.from_host(host, self.device)
        return Result(made, made.pointer)

    def _is_capturing(self) -> bool:
        if self._torch is None:
            return is_capturing(self._stream)
        with self._torch_stream():
            return bool(self._torch.cuda.is_current_stream_capturing())

    def _common_device(self) -> int:
        first = next(iter(self._views), None)
        if first is None:
            raise InputError(f"{self.op}: expected arrays, found None")
        device = self._views[first].device
        for name, found in self._views.items():
            if found.device != device:
                raise InputError(
                    f"{self.op}: {name}: expected on {device_name(device)} like {first}, "
                    f"found on {device_name(found.device)}"
                )
        if device == _native.CPU and self._explicit_stream is not None:
            raise InputError(
                f"{self.op}: stream: expected None for arrays on cpu, "
                f"found {self._explicit_stream!r}"
            )
        return device

    def _choose_stream(self, given: dict[str, Array]) -> int:
        if self._explicit_stream is not None:
            return _stream_handle(self.op, self._explicit_stream)
        for array in given.values():
            if torch_of([array]) and array.is_cuda:
                return int(self._torch.cuda.current_stream(array.device).cuda_stream)
        return 0

    def _torch_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Makes torch's allocator tie new memory to the stream that the op runs on."""
        if self._explicit_stream is None or self.device == _native.CPU:
            return contextlib.nullcontext()
        cuda = self._torch.cuda
        stream: contextlib.AbstractContextManager[Any] = cuda.stream(
            cuda.ExternalStream(self._stream, device=self.device)
        )
        return stream


def integer(where: str, value: object) -> int:
    """Any kind of integer that 63 bits hold: the C ABI would take other bits for it."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise InputError(f"{where}: expected an integer of 63 bits, found {value!r}")
    return number


def number(where: str, value: object) -> float:
    """Any kind of real number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{where}: expected a number, found {value!r}") from None


def check_head_dim(where: str, head_dim: int) -> None:
    if integer(where, head_dim) <= 0 or head_dim % SCALE_BLOCK:
        raise InputError(f"{where}: expected a multiple of {SCALE_BLOCK}, found {head_dim}")


def output_pair(op: str, out: tuple[Array, Array] | None) -> dict[str, Array]:
    """`out` of an op with two results, as the arguments of a Call."""
    if out is None:
        return {}
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise InputError(
            f"{op}: out: expected a pair of arrays (values, scales), found {type(out).__name__}"
        )
    return {"out_values": out[0], "out_scales": out[1]}


def _stream_handle(op: str, stream: Any) -> int:
    """cudaStream_t of an int, a torch stream, or a stream of cuda-python or CuPy."""
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    handle = getattr(stream, "cuda_stream", stream)
    if isinstance(handle, bool) or not hasattr(handle, "__int__") or isinstance(handle, float):
        raise InputError(
            f"{op}: stream: expected an int, a torch stream or a cuda-python stream, "
            f"found {stream!r}"
        )
    return int(handle)


def _describe(dtypes: Dtypes, shape: Shape) -> str:
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return f"{' or '.join(dtypes)} [{sizes}]"
