# SPDX-License-Identifier: Apache-2.0
"""DeviceArray on a made-up CUDA run time: device memory lies on the host, calls are noted."""

import ctypes
import gc
import re
import sys
from enum import IntEnum
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import dlpack
from trtllm_engram.runtime.device_array import DeviceArray, cuda


class Status(IntEnum):
    cudaSuccess = 0  # noqa: N815
    cudaErrorInvalidValue = 1  # noqa: N815


class Runtime:
    """The functions of cuda.bindings that DeviceArray calls. A context is its device's number."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)  # noqa: N815
    cudaStreamCaptureStatus = SimpleNamespace(cudaStreamCaptureStatusNone=0)  # noqa: N815

    def __init__(self):
        self.calls = []
        self.memory = {}
        self.device = 0
        self.capturing = False

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments):
            self.calls.append((name, *arguments))
            result = getattr(self, f"_{name}", lambda *_: None)(*arguments)
            return (Status.cudaSuccess,) if result is None else (Status.cudaSuccess, result)

        return function

    def names(self):
        of_devices = ("cuInit", "cuCtxGetCurrent", "cuCtxSetCurrent", "cudaSetDevice")
        return [name for name, *_ in self.calls if name not in of_devices]

    def _cuCtxGetCurrent(self):  # noqa: N802
        return self.device

    def _cuCtxSetCurrent(self, context):  # noqa: N802
        self.device = context

    def _cudaSetDevice(self, device):  # noqa: N802
        self.device = device

    def _cudaStreamIsCapturing(self, _stream):  # noqa: N802
        return int(self.capturing)

    def _cudaEventCreateWithFlags(self, _flags):  # noqa: N802
        return "event"

    def _cudaMallocAsync(self, size, _stream):  # noqa: N802
        buffer = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def _cudaFreeAsync(self, pointer, _stream):  # noqa: N802
        del self.memory[pointer]

    def _cudaFree(self, pointer):  # noqa: N802
        del self.memory[pointer]

    def _cudaMemcpyAsync(self, target, source, size, _kind, _stream):  # noqa: N802
        ctypes.memmove(target, source, size)


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", made)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", made)
    return made


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 1, 4), (0, 5), ()], ids=str)
def test_round_trip(runtime, dtype, shape):
    host = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    array = DeviceArray.from_host(host, stream=3)
    found = array.copy_to_host()
    assert (found.dtype, found.shape) == (host.dtype, shape)
    np.testing.assert_array_equal(found, host)
    del array
    gc.collect()
    assert not runtime.memory


@pytest.mark.usefixtures("runtime")
def test_strided_host():
    host = np.arange(12).reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(DeviceArray.from_host(host).copy_to_host(), host)


def test_work_is_on_its_device_and_stream(runtime):
    array = DeviceArray.from_host(np.zeros(3), device=2, stream=9, keep=object())
    assert ("cudaSetDevice", 2) in runtime.calls
    assert runtime.device == 0, "the thread's device is what it was"
    pointer = array.pointer
    del array
    gc.collect()
    assert ("cudaMallocAsync", 24, 9) in runtime.calls
    assert ("cudaFreeAsync", pointer, 9) in runtime.calls


def test_a_stream_known_by_number_may_be_gone(runtime):
    array = DeviceArray.from_host(np.zeros(3), stream=9, keep=9)
    pointer = array.pointer
    runtime.calls.clear()
    del array
    gc.collect()
    assert runtime.names() == ["cudaFree"]
    assert ("cudaFree", pointer) in runtime.calls


def test_no_wait_under_capture(runtime):
    array = DeviceArray.from_host(np.zeros(3))
    runtime.capturing = True
    array.__dlpack__(stream=7)
    assert "cudaStreamWaitEvent" not in runtime.names()


@pytest.mark.usefixtures("runtime")
def test_keeps_the_streams_owner():
    owner = {"a stream": 9}
    count = sys.getrefcount(owner)
    array = DeviceArray((3,), np.uint8, stream=9, keep=owner)
    assert sys.getrefcount(owner) == count + 1
    del array


def test_dlpack(runtime):
    """Memory lives as long as what was made of the capsule."""
    array = DeviceArray.from_host(np.arange(6, dtype=np.int32).reshape(2, 3), device=1)
    pointer = array.pointer
    assert array.__dlpack_device__() == (dlpack.CUDA, 1)
    imported = dlpack.read(array, 1)
    assert (imported.pointer, imported.shape) == (pointer, (2, 3))
    assert (imported.dtype, imported.device_id) == ("int32", 1)
    del array
    gc.collect()
    assert pointer in runtime.memory
    del imported
    gc.collect()
    assert pointer not in runtime.memory


@pytest.mark.parametrize(
    ("consumer", "waits"),
    [(7, True), (None, True), (1, True), (9, False), (-1, False)],
    ids=["other", "default", "legacy", "same", "unsynchronised"],
)
def test_dlpack_stream(runtime, consumer, waits):
    """A consumer's stream waits for the array's, except where it is the same or asks not to."""
    array = DeviceArray((3,), np.uint8, stream=9)
    array.__dlpack__(stream=consumer)
    events = ["cudaEventRecord", "cudaStreamWaitEvent"]
    assert [name for name in runtime.names() if name in events] == (events if waits else [])
    if waits:
        assert ("cudaEventRecord", "event", 9) in runtime.calls
        assert ("cudaStreamWaitEvent", consumer or 1, "event", 0) in runtime.calls


def test_legacy_stream_has_two_names(runtime):
    DeviceArray((3,), np.uint8, stream=0).__dlpack__(stream=1)
    assert "cudaEventRecord" not in runtime.names()


@pytest.mark.usefixtures("runtime")
def test_cuda_array_interface():
    array = DeviceArray((2, 3), ml_dtypes.bfloat16)
    assert array.__cuda_array_interface__ == {
        "shape": (2, 3),
        "typestr": "<u2",
        "data": (array.pointer, False),
        "version": 3,
        "stream": 1,
    }
    assert DeviceArray((2,), np.int32).__cuda_array_interface__["typestr"] == "<i4"


def test_capture(runtime):
    runtime.capturing = True
    text = "out: expected an array under stream capture, found None"
    with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
        DeviceArray((3,), np.uint8)


@pytest.mark.usefixtures("runtime")
def test_cuda_error(monkeypatch):
    monkeypatch.setattr(
        Runtime, "cudaSetDevice", lambda *_: (Status.cudaErrorInvalidValue,), raising=False
    )
    with pytest.raises(EngramError, match=r"^cudaSetDevice: cudaErrorInvalidValue$"):
        cuda("cudaSetDevice", 5)


def test_no_cuda_python(monkeypatch):
    """The text names the extra to install."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(EngramError, match=r"pip install cuda-bindings$"):
        DeviceArray((3,), np.uint8)
