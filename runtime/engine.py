# SPDX-License-Identifier: Apache-2.0
"""Runs TensorRT plans with our plugins: eager calls and CUDA graphs, on any kind of array.

    with Tables.of_store(store):
        engine = Engine("engine.plan")
        execution = engine.execution(profile=1)
        outputs = execution.run({"token_ids": ids, ...})     # by name, arrays as for runtime.ops
        graph = execution.capture(inputs_on_the_gpu)          # then graph.replay()

Tables must be bound before an execution is made. Needs TensorRT's and CUDA's Python packages.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_engram.builder.dtypes import TENSORRT
from trtllm_engram.builder.files import reading
from trtllm_engram.builder.tensorrt_log import tensorrt_logger, told
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.plugins.registration import import_tensorrt, register

from . import _native
from .arrays import BF16, BOOL, FP8, INT32, Array, Dtypes, device_name
from .call import Call
from .device_array import DeviceArray, constant, cuda, current_device, wait
from .devices import require_gpu

Arrays = Mapping[str, Array]

_EMPTY_BYTES = 256  # what tensors without elements point to

# The dtypes that arrays for a tensor may have; outputs get the first.
_ARRAY_DTYPES: dict[str, Dtypes] = {
    "bfloat16": BF16,
    "float16": ("float16",),
    "float32": ("float32",),
    "float8_e4m3fn": tuple(reversed(FP8)),
    "int32": INT32,
    "int64": ("int64",),
    "bool": BOOL,
}


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of an engine; a size of None is dynamic."""

    dtype: str
    shape: tuple[int | None, ...]


class Engine:
    """A plan on one GPU. Attributes: inputs and outputs, TensorInfo by name; num_profiles."""

    def __init__(self, plan: str | os.PathLike[str] | bytes | memoryview, device: int = 0) -> None:
        """plan: a file, or the plan itself."""
        where, content = "plan", plan
        if isinstance(plan, (str, os.PathLike)):
            where = os.fspath(plan)
            with reading(Path(plan)):
                content = Path(plan).read_bytes()
        require_gpu("engine")  # without one, TensorRT's runtime would end the process
        trt = import_tensorrt()
        self.device = device
        with current_device(device), told(where) as failure:
            self._runtime = failure.check(trt.Runtime(tensorrt_logger()))
            register(trt)
        # Apart: to register what is registered is an error line of TensorRT's, and names a plugin.
        with current_device(device), told(where) as failure:
            # Plans with the lean runtime would bring code along; ours exclude it.
            self.cuda_engine = failure.check(self._runtime.deserialize_cuda_engine(content))
            failure.check_plugins()
        self.num_profiles: int = self.cuda_engine.num_optimization_profiles
        self.inputs: dict[str, TensorInfo] = {}
        self.outputs: dict[str, TensorInfo] = {}
        names = {getattr(trt.DataType, name): dtype for dtype, name in TENSORRT.items()}
        for index in range(self.cuda_engine.num_io_tensors):
            name = self.cuda_engine.get_tensor_name(index)
            shape = tuple(
                None if size < 0 else int(size) for size in self.cuda_engine.get_tensor_shape(name)
            )
            dtype = self.cuda_engine.get_tensor_dtype(name)
            if dtype not in names:
                known = ", ".join(TENSORRT.values())
                raise EngramError(f"{where}: {name}: expected a type of {known}, found {dtype}")
            info = TensorInfo(names[dtype], shape)
            is_input = self.cuda_engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            (self.inputs if is_input else self.outputs)[name] = info

    def execution(self, profile: int = 0) -> Execution:
        """A new execution context for the calls of one profile."""
        return Execution(self, profile)

    def shape_range(self, name: str, profile: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The least and the largest shape that a profile takes for an input."""
        least, _, most = self.cuda_engine.get_tensor_profile_shape(name, profile)
        return tuple(least), tuple(most)

    def find_profile(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The first profile that takes these shapes."""
        for profile in range(self.num_profiles):
            if all(self._fits(name, shape, profile) for name, shape in shapes.items()):
                return profile
        last = self.num_profiles - 1
        for name, shape in shapes.items():
            if not self._fits(name, shape, last):
                raise InputError(self._refusal(name, shape, last))
        raise InputError(f"profile: expected one that takes {dict(shapes)}, found none")

    def check_shape(self, name: str, shape: tuple[int, ...], profile: int) -> None:
        if not self._fits(name, shape, profile):
            raise InputError(self._refusal(name, shape, profile))

    def _fits(self, name: str, shape: tuple[int, ...], profile: int) -> bool:
        least, most = self.shape_range(name, profile)
        return len(shape) == len(most) and all(
            low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
        )

    def _refusal(self, name: str, shape: tuple[int, ...], profile: int) -> str:
        least, most = self.shape_range(name, profile)
        return (
            f"{name}: expected a shape from {list(least)} to {list(most)} in profile {profile}, "
            f"found {list(shape)}"
        )


class Execution:
    """One execution context: for one thread and one stream at a time."""

    def __init__(self, engine: Engine, profile: int) -> None:
        if not 0 <= profile < engine.num_profiles:
            raise InputError(f"profile: expected 0 to {engine.num_profiles - 1}, found {profile}")
        self.engine = engine
        self.profile = profile
        with current_device(engine.device), told("execution context") as failure:
            self._stream = int(cuda("cudaStreamCreateWithFlags", 1))  # cudaStreamNonBlocking
            self._context = failure.check(engine.cuda_engine.create_execution_context())
            failure.check_plugins()
            chosen = self._context.set_optimization_profile_async(profile, self._stream)
            failure.check(chosen)
            cuda("cudaStreamSynchronize", self._stream)
        self._empty = DeviceArray((_EMPTY_BYTES,), np.uint8, engine.device)

    def run(self, inputs: Arrays, out: Arrays | None = None, stream: Any = None) -> dict[str, Any]:
        """Outputs by name: of `out` where it has them, else new; in the kind that ops would make.

        Work is enqueued only, on `stream` as ops choose it, except with numpy arrays: those are
        copied over, and the call waits for its end. All numpy in, numpy out.
        """
        for name in out or {}:
            if name not in self.engine.outputs:
                known = ", ".join(self.engine.outputs)
                raise InputError(f"engine: out: expected outputs of {known}; found {name!r}")
        uploads = {name: array for name, array in inputs.items() if isinstance(array, np.ndarray)}
        device = self.engine.device
        on_device = {name: DeviceArray.from_host(array, device) for name, array in uploads.items()}
        call = Call("engine", stream, **{**inputs, **on_device, **(out or {})})
        if call.device != device:
            raise InputError(
                f"engine: expected arrays on {device_name(device)}, "
                f"found {device_name(call.device)}"
            )
        results = self._bind(call, inputs)
        self._enqueue(call.stream)
        if uploads:
            with current_device(device):
                cuda("cudaStreamSynchronize", call.stream)
            _native.device_fault(device)
        if len(uploads) == len(inputs) and not out:
            return {name: array.copy_to_host() for name, array in results.items()}
        return results

    def capture(self, inputs: Arrays, out: Arrays | None = None) -> Graph:
        """A CUDA graph of one run on these very arrays, after a first run of them."""
        for name, array in inputs.items():
            if isinstance(array, np.ndarray):
                raise InputError(f"engine: {name}: expected an array on the GPU, found numpy's")
        outputs = self.run(inputs, out)
        return Graph(self, dict(inputs), outputs)

    def _bind(self, call: Call, inputs: Arrays) -> dict[str, Any]:
        """Gives the context shapes and addresses; returns the outputs."""
        for name in inputs:
            if name not in self.engine.inputs:
                known = ", ".join(self.engine.inputs)
                raise InputError(f"engine: expected inputs of {known}; found {name!r}")
        for name, info in self.engine.inputs.items():
            found = call.input(name, _ARRAY_DTYPES[info.dtype], info.shape)
            self.engine.check_shape(name, found.shape, self.profile)
            with told(name) as failure:
                failure.check(self._context.set_input_shape(name, found.shape))
            self._set_address(name, found.pointer)
        results = {}
        for name, info in self.engine.outputs.items():
            shape = tuple(int(size) for size in self._context.get_tensor_shape(name))
            if any(size < 0 for size in shape):
                raise EngramError(f"{name}: expected a known shape, found {list(shape)}")
            made = call.result(name, _ARRAY_DTYPES[info.dtype], shape)
            self._set_address(name, made.pointer)
            results[name] = made.array
        return results

    def _set_address(self, name: str, pointer: int) -> None:
        with told(name) as failure:
            failure.check(self._context.set_tensor_address(name, pointer or self._empty.pointer))

    def _enqueue(self, stream: int) -> None:
        device = self.engine.device
        # TensorRT synchronises around the legacy default stream: a stream of our own stands in.
        own = stream or self._stream
        if own != stream:
            wait(own, stream, device)
        self.enqueue_on(own)
        if own != stream:
            wait(stream, own, device)

    def enqueue_on(self, stream: int) -> None:
        """Enqueues the context as it is."""
        with current_device(self.engine.device), told("engine") as failure:
            failure.check(self._context.execute_async_v3(stream))

    def __del__(self) -> None:
        if getattr(self, "_stream", 0):
            _quietly(self.engine.device, "cudaStreamDestroy", self._stream)


class Graph:
    """A captured run. Write new values into `inputs`, replay, read `outputs`: the same arrays."""

    def __init__(
        self, execution: Execution, inputs: dict[str, Any], outputs: dict[str, Any]
    ) -> None:
        self.execution = execution
        self.inputs = inputs
        self.outputs = outputs
        self._handle: Any = None
        device = execution.engine.device
        with current_device(device):
            cuda("cudaDeviceSynchronize")
            stream = int(cuda("cudaStreamCreateWithFlags", 1))  # cudaStreamNonBlocking
            try:
                mode = constant("cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal")
                cuda("cudaStreamBeginCapture", stream, mode)
                try:
                    execution.enqueue_on(stream)
                except BaseException:
                    with contextlib.suppress(EngramError):  # says only that the capture is invalid
                        cuda("cudaStreamEndCapture", stream)
                    raise
                graph = cuda("cudaStreamEndCapture", stream)
                try:
                    self._handle = cuda("cudaGraphInstantiate", graph, 0)
                finally:
                    cuda("cudaGraphDestroy", graph)
            finally:
                cuda("cudaStreamDestroy", stream)

    def replay(self, stream: Any = None) -> dict[str, Any]:
        """Enqueues the graph where an op on its arrays would run; returns `outputs`.

        Bad input that a GPU meets in a replay is told by the next run() or op on that GPU, or by
        ops.raise_device_fault(), never by another replay.
        """
        call = Call("replay", stream, **self.inputs)
        with current_device(self.execution.engine.device):
            cuda("cudaGraphLaunch", self._handle, call.stream)
        return self.outputs

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            _quietly(self.execution.engine.device, "cudaGraphExecDestroy", self._handle)


def _quietly(device: int, function: str, handle: Any) -> None:
    """For destructors: while Python shuts down modules may be gone, and the process frees all."""
    try:
        with current_device(device):
            cuda(function, handle)
    except Exception:
        return
