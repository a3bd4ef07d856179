# SPDX-License-Identifier: Apache-2.0
"""GPU arrays for callers without torch, on cuda-python."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_engram.plugins.errors import EngramError, InputError

from . import dlpack

LEGACY_STREAM = 1  # how DLPack and __cuda_array_interface__ name the legacy default stream
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def cuda(function: str, *arguments: Any) -> Any:
    """Calls a function of the CUDA run time, or of the driver where its name begins with cu alone;
    returns its result, a tuple where it has several."""
    part = "runtime" if function.startswith("cuda") else "driver"
    try:
        module = importlib.import_module(f"cuda.bindings.{part}")
    except ImportError:
        raise EngramError(
            "CUDA arrays: expected torch tensors or the package cuda-bindings, found neither: "
            "pip install cuda-bindings"
        ) from None
    status, *results = getattr(module, function)(*arguments)
    if int(status) != 0:
        raise EngramError(f"{function}: {status.name}")
    return results[0] if len(results) == 1 else tuple(results)


def constant(name: str) -> Any:
    """cudaGroup.member of cuda-python, such as cudaMemcpyKind.cudaMemcpyHostToDevice."""
    group, member = name.split(".")
    runtime = importlib.import_module("cuda.bindings.runtime")
    return getattr(getattr(runtime, group), member)


@contextlib.contextmanager
def current_device(device: int) -> Iterator[None]:
    """Makes a device the thread's current one for a while. Afterwards the thread has the context
    that it had, or none: to set a device back would make one, in memory of that GPU."""
    cuda("cuInit", 0)  # which only the run time's calls do by themselves
    before = cuda("cuCtxGetCurrent")
    cuda("cudaSetDevice", device)
    try:
        yield
    finally:
        cuda("cuCtxSetCurrent", before)


def is_capturing(stream: int) -> bool:
    status = cuda("cudaStreamIsCapturing", stream)
    return bool(status != constant("cudaStreamCaptureStatus.cudaStreamCaptureStatusNone"))


def wait(stream: int, producer: int, device: int) -> None:
    """Makes work enqueued on `stream` from now on wait for all that is on `producer` now.

    A stream under capture cannot wait for work outside its graph: what a graph reads has to be
    complete before a replay anyway, and that order is the caller's.
    """
    if (stream or LEGACY_STREAM) == (producer or LEGACY_STREAM):
        return
    with current_device(device):
        if is_capturing(stream):
            return
        event = cuda("cudaEventCreateWithFlags", 2)  # cudaEventDisableTiming
        cuda("cudaEventRecord", event, producer)
        cuda("cudaStreamWaitEvent", stream, event, 0)
        cuda("cudaEventDestroy", event)


@contextlib.contextmanager
def stream_memory(num_bytes: int, device: int, stream: int) -> Iterator[int]:
    """Memory for what is enqueued on the stream inside; captured, it is a part of the graph."""
    with current_device(device):
        pointer = int(cuda("cudaMallocAsync", num_bytes, stream))
        try:
            yield pointer
        finally:
            cuda("cudaFreeAsync", pointer, stream)


class DeviceArray:
    """A contiguous array in GPU memory: the result of an op on CUDA arrays other than torch's.

    torch.from_dlpack, cupy.from_dlpack and jax.dlpack.from_dlpack take it without a copy. Memory is
    made and freed in the order of its stream: work on it in another stream must be joined into that
    stream before the array is dropped. A stream that is known by its number alone may be gone by
    then, so the memory is freed once the whole device is idle.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        device: int = 0,
        stream: int = 0,
        keep: object = None,
    ) -> None:
        """Uninitialised memory; `keep` (an owner of the stream) is held as long as the array."""
        self.pointer = 0
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.device = device
        self.stream = stream
        self._keep = keep
        self._stream_is_kept = not stream or not isinstance(keep, (int, type(None)))
        if self.nbytes:
            with current_device(device):
                if is_capturing(stream):
                    raise InputError("out: expected an array under stream capture, found None")
                self.pointer = int(cuda("cudaMallocAsync", self.nbytes, stream))

    @classmethod
    def from_host(
        cls, host: npt.NDArray[Any], device: int = 0, stream: int = 0, keep: object = None
    ) -> DeviceArray:
        """A copy of a numpy array; the copy is complete on return."""
        host = np.asarray(host, order="C")
        array = cls(host.shape, host.dtype, device, stream, keep)
        array._copy(array.pointer, host.ctypes.data, "cudaMemcpyHostToDevice")
        return array

    def copy_to_host(self) -> npt.NDArray[Any]:
        """A numpy copy, after waiting for the array's stream."""
        host = np.empty(self.shape, self.dtype)
        self._copy(host.ctypes.data, self.pointer, "cudaMemcpyDeviceToHost")
        return host

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype} {list(self.shape)} on cuda:{self.device})"

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.device

    def __dlpack__(self, *, stream: int | None = None, **_unused: Any) -> object:
        if stream != -1:  # -1: the consumer takes care of the order itself
            wait(stream or LEGACY_STREAM, self.stream, self.device)
        return dlpack.export(self, self.pointer, self.shape, self.dtype.name, self.device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # The protocol has no BF16: its bits are given as uint16.
        typestr = "<u2" if self.dtype == _BFLOAT16 else self.dtype.str
        return {
            "shape": self.shape,
            "typestr": typestr,
            "data": (self.pointer, False),
            "version": 3,
            "stream": self.stream or LEGACY_STREAM,
        }

    def __del__(self) -> None:
        if getattr(self, "pointer", 0):
            # While Python shuts down modules may be gone; the process frees the memory then.
            with contextlib.suppress(Exception), current_device(self.device):
                if self._stream_is_kept:
                    cuda("cudaFreeAsync", self.pointer, self.stream)
                else:
                    cuda("cudaFree", self.pointer)

    def _copy(self, target: int, source: int, kind: str) -> None:
        if not self.nbytes:
            return
        with current_device(self.device):
            cuda(
                "cudaMemcpyAsync",
                target,
                source,
                self.nbytes,
                constant(f"cudaMemcpyKind.{kind}"),
                self.stream,
            )
            cuda("cudaStreamSynchronize", self.stream)
