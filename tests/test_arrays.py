# SPDX-License-Identifier: Apache-2.0
"""What arrays ops take, in which kind results come, and the texts about arrays that do not fit."""

import gc
import re
import subprocess
import sys
import threading
import weakref

import generators
import ml_dtypes
import numpy as np
import pytest
import reference
from devices import DeviceArrays, Torch

from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import dlpack, ops
from trtllm_engram.runtime.call import Call
from trtllm_engram.runtime.engine import _ARRAY_DTYPES

VALUES, SCALES = generators.table(31)
IDS = generators.row_ids(np.random.default_rng(1), 5, 2, 31)
EXPECTED = reference.lookup(VALUES, SCALES, IDS)


class Producer:
    """An array of some other framework, known by DLPack alone."""

    def __init__(self, array, device_type=dlpack.CPU):
        self.array = array
        self.device_type = device_type

    def __dlpack_device__(self):
        return self.device_type, 0

    def __dlpack__(self, *, stream=None, max_version=None):
        assert stream is None, "host memory has no stream"
        return self.array.__dlpack__(max_version=max_version)


class OldProducer(Producer):
    """From before DLPack 1.0."""

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__(stream=stream)


class OnGpu:
    """Says that it lies on a GPU; good for all that happens before memory is touched."""

    def __init__(self, array, device=0):
        self.array = array
        self.device = device
        self.streams = []

    def __dlpack_device__(self):
        return dlpack.CUDA, self.device

    def __dlpack__(self, *, stream, **_unused):
        self.streams.append(stream)
        pointer, shape = self.array.ctypes.data, self.array.shape
        return dlpack.export(self, pointer, shape, self.array.dtype.name, self.device)


@pytest.mark.parametrize("producer", [Producer, OldProducer], ids=["dlpack1", "dlpack0"])
def test_dlpack_in_numpy_out(producer):
    rows = ops.lookup(producer(VALUES), producer(SCALES), producer(IDS))
    assert rows.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(rows.view(np.uint16), EXPECTED)


@pytest.mark.parametrize("producer", [Producer, OldProducer], ids=["dlpack1", "dlpack0"])
def test_dlpack_strides(producer):
    wide = np.repeat(IDS, 3, axis=0)
    rows = ops.lookup(VALUES, SCALES, producer(wide[::3]))
    np.testing.assert_array_equal(rows.view(np.uint16), EXPECTED)
    with pytest.raises(InputError, match="values: expected a contiguous array"):
        ops.lookup(producer(np.zeros((31, 512), np.uint8)[:, ::2]), SCALES, IDS)


def test_dlpack_read_only_out():
    out = np.zeros((5, 512), np.uint16)
    out.flags.writeable = False
    with pytest.raises(InputError, match="out: expected a writable array, found a read-only one"):
        ops.lookup(VALUES, SCALES, IDS, out=Producer(out))


def test_dlpack_other_device():
    with pytest.raises(InputError, match="scales: expected on cpu or cuda, found DLPack device 10"):
        ops.lookup(VALUES, Producer(SCALES, device_type=10), IDS)


def test_export_is_read_back():
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    found = dlpack.read(OnGpu(array), 1)
    assert found.pointer == array.ctypes.data
    assert found.shape == (2, 3, 4)
    assert found.strides == array.strides
    assert found.dtype == "int32"
    assert (found.device_type, found.device_id, found.read_only) == (dlpack.CUDA, 0, False)


def test_export_keeps_its_owner_until_dropped():
    owner = OnGpu(np.zeros(3, np.uint8))
    gone = weakref.ref(owner)
    capsule = owner.__dlpack__(stream=1)
    del owner
    gc.collect()
    assert gone() is not None
    del capsule
    gc.collect()
    assert gone() is None


def test_memory_outlives_the_call():
    """Views hold what they were made from: temporaries of the caller may die during the call."""
    rows = ops.lookup(Producer(VALUES.copy()), Producer(SCALES.copy()), Producer(IDS.copy()))
    gc.collect()
    np.testing.assert_array_equal(rows.view(np.uint16), EXPECTED)


@pytest.mark.parametrize(("stream", "handle"), [(None, 1), (7, 7)], ids=["default", "own"])
def test_producers_are_told_the_stream(stream, handle):
    values = OnGpu(VALUES)
    with pytest.raises(InputError, match="ids: expected int32"):
        ops.lookup(values, OnGpu(SCALES), OnGpu(IDS.astype(np.int64)), stream=stream)
    assert values.streams == [handle]


class CudaStream:
    def __cuda_stream__(self):
        return 0, 11


class TorchStream:
    cuda_stream = 11


@pytest.mark.parametrize(
    "stream", [CudaStream(), TorchStream(), np.int64(11)], ids=lambda s: type(s).__name__
)
def test_kinds_of_streams(stream):
    values = OnGpu(VALUES)
    with pytest.raises(InputError, match="scales: expected"):
        ops.lookup(values, OnGpu(VALUES), OnGpu(IDS), stream=stream)
    assert values.streams == [11]


NOT_CONTIGUOUS = np.zeros((31, 512), np.uint8)[:, ::2]
MISALIGNED = np.zeros(41, np.uint8)[1:].view(np.int32).reshape(5, 2)
READ_ONLY = np.zeros((5, 512), np.uint16)
READ_ONLY.flags.writeable = False
REFUSED = {
    "list": (
        {"ids": IDS.tolist()},
        "ids: expected a numpy array, a torch tensor, or an array with __dlpack__ or "
        "__cuda_array_interface__, found list",
    ),
    "big_endian": ({"ids": IDS.astype(">i4")}, "ids: expected int32 [any, any], found >i4 [5, 2]"),
    "misaligned": ({"ids": MISALIGNED}, "ids: expected int32 aligned to 4 bytes, found address"),
    "not_contiguous": (
        {"values": NOT_CONTIGUOUS},
        "values: expected a contiguous array, found shape [31, 256] with strides of [512, 2] bytes",
    ),
    "fortran": (
        {"values": np.asfortranarray(VALUES)},
        "values: expected a contiguous array, found shape [31, 256] with strides of [1, 31] bytes",
    ),
    "read_only_out": (
        {"out": READ_ONLY},
        "out: expected a writable array, found a read-only one",
    ),
    "out_shape": (
        {"out": np.zeros((4, 512), np.uint16)},
        "out: expected bfloat16 or uint16 [5, 512], found uint16 [4, 512]",
    ),
    "out_on_gpu": ({"out": OnGpu(READ_ONLY)}, "out: expected on cpu like values, found on cuda:0"),
    "ids_on_gpu": ({"ids": OnGpu(IDS, 3)}, "ids: expected on cpu like values, found on cuda:3"),
    "values_on_gpu": (
        {"values": OnGpu(VALUES)},
        "scales: expected on cuda:0 like values, found on cpu",
    ),
    "two_gpus": (
        {"values": OnGpu(VALUES), "scales": OnGpu(SCALES, 1), "ids": OnGpu(IDS)},
        "scales: expected on cuda:0 like values, found on cuda:1",
    ),
    "stream_on_cpu": ({"stream": 7}, "stream: expected None for arrays on cpu, found 7"),
    "stream_type": (
        {"stream": "main"},
        "stream: expected an int, a torch stream or a cuda-python stream, found 'main'",
    ),
    "nothing": ({"values": None, "scales": None, "ids": None}, "expected arrays, found None"),
}


@pytest.mark.parametrize(("changes", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(changes, text):
    arguments = {"values": VALUES, "scales": SCALES, "ids": IDS} | changes
    with pytest.raises(InputError, match=f"^lookup: {re.escape(text)}") as error:
        ops.lookup(**arguments)
    assert "\n" not in str(error.value)


def test_strides_of_empty_and_single_axes_do_not_matter():
    one = np.zeros((1, 512), np.uint8)[:, :256]
    assert ops.lookup(one, SCALES[:1], IDS[:0]).shape == (0, 512)
    wide = np.zeros((1, 64), np.int32)[:, :2]
    assert ops.lookup(VALUES, SCALES, wide).shape == (1, 512)


def test_threads():
    """Calls from many threads at once do not disturb each other, errors included."""
    failures = []

    def work(seed):
        ids = generators.row_ids(np.random.default_rng(seed), 40, 3, 31)
        expected = reference.lookup(VALUES, SCALES, ids)
        for _ in range(20):
            if not np.array_equal(ops.lookup(VALUES, SCALES, ids).view(np.uint16), expected):
                failures.append(f"rows of thread {seed}")
            with pytest.raises(InputError, match=f"eps: expected 0 to 1, got {seed + 2}$"):
                ops.gate(*GATE_INPUTS, seed + 2)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


GATE_INPUTS = [np.zeros(shape, np.uint16) for shape in ((1, 1, 8), (1, 16), (1, 8), (1, 8))]


def test_torch_on_cpu():
    torch = pytest.importorskip("torch")
    device = Torch("cpu")
    rows = ops.lookup(*map(device.put, (VALUES, SCALES, IDS)))
    assert rows.dtype == torch.bfloat16
    np.testing.assert_array_equal(device.get(rows), EXPECTED)
    exact = device.put(VALUES).view(torch.float8_e4m3fn), device.put(SCALES)
    np.testing.assert_array_equal(device.get(ops.lookup(*exact, device.put(IDS))), EXPECTED)


def test_one_tensor_makes_tensors():
    torch = pytest.importorskip("torch")
    rows = ops.lookup(VALUES, SCALES, torch.tensor(IDS))
    np.testing.assert_array_equal(Torch("cpu").get(rows), EXPECTED)
    with pytest.raises(InputError, match=r"values: expected a contiguous array, found shape"):
        ops.lookup(torch.tensor(np.repeat(VALUES, 2, axis=1))[:, ::2], SCALES, IDS)
    with pytest.raises(InputError, match="ids: expected on cpu or cuda, found on meta"):
        ops.lookup(VALUES, SCALES, torch.zeros((5, 2), dtype=torch.int32, device="meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("explicit", [False, True], ids=["current", "argument"])
def test_torch_streams(explicit):
    """Work goes to torch's current stream, or to the one that is named."""
    import torch

    device = Torch()
    inputs = [device.put(array) for array in (VALUES, SCALES, IDS)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    if explicit:
        rows = ops.lookup(*inputs, stream=stream)
    else:
        with torch.cuda.stream(stream):
            rows = ops.lookup(*inputs)
    stream.synchronize()
    np.testing.assert_array_equal(device.get(rows), EXPECTED)


@pytest.mark.gpu
def test_device_array_to_torch():
    """A DeviceArray goes to torch without a copy, by either protocol, and keeps its memory."""
    import torch

    put = DeviceArrays().put
    rows = ops.lookup(put(VALUES), put(SCALES), put(IDS))
    tensor = torch.from_dlpack(rows)
    packed = ops.lookup_packed(put(VALUES), put(SCALES), put(IDS))
    by_interface = torch.as_tensor(packed, device="cuda")
    assert (tensor.data_ptr(), by_interface.data_ptr()) == (rows.pointer, packed.pointer)
    expected_packed = reference.lookup_packed(VALUES, SCALES, IDS)
    np.testing.assert_array_equal(by_interface.cpu().numpy(), expected_packed)
    del rows
    gc.collect()
    np.testing.assert_array_equal(Torch().get(tensor), EXPECTED)


@pytest.mark.gpu
def test_a_thread_has_the_context_that_it_had():
    """Here none; and a GPU that nobody chose has none, which would be memory taken there."""
    script = """if True:
        import numpy as np
        from trtllm_engram.runtime import gpus, ops
        from trtllm_engram.runtime.device_array import DeviceArray, cuda
        last = len(gpus.probe_driver().gpus) - 1
        rows, scales = np.zeros((4, 32), np.uint8), np.full((4, 1), 127, np.uint8)
        ids = np.zeros((2, 1), np.int32)
        inputs = [DeviceArray.from_host(array, device=last) for array in (rows, scales, ids)]
        assert not ops.lookup(*inputs).copy_to_host().any()
        assert int(cuda("cuCtxGetCurrent")) == 0
        has_context = [cuda("cuDevicePrimaryCtxGetState", gpu)[1] for gpu in range(last + 1)]
        assert has_context == [0] * last + [1], has_context
        """
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.gpu
def test_cupy():
    """CuPy's arrays come in and go out by DLPack, ordered with CuPy's streams."""
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        inputs = [cupy.asarray(array) for array in (VALUES, SCALES, IDS)]
        packed = cupy.from_dlpack(ops.lookup_packed(*inputs, stream=stream.ptr))
        expected = reference.lookup_packed(VALUES, SCALES, IDS)
        np.testing.assert_array_equal(cupy.asnumpy(packed), expected)
        with pytest.raises(InputError, match="ids: expected a contiguous array"):
            ops.lookup(*inputs[:2], cupy.zeros((5, 4), cupy.int32)[:, ::2])


class InterfaceOnly:
    """As Numba's arrays are."""

    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


@pytest.mark.gpu
def test_cuda_array_interface():
    put = DeviceArrays().put
    rows = ops.lookup(*(InterfaceOnly(put(array)) for array in (VALUES, SCALES, IDS)))
    np.testing.assert_array_equal(DeviceArrays().get(rows), EXPECTED)


@pytest.mark.gpu
def test_streams_of_device_arrays():
    """Results of one stream are inputs of another: the producer's work is waited for."""
    from trtllm_engram.runtime.device_array import cuda

    put = DeviceArrays().put
    one, other = (int(cuda("cudaStreamCreateWithFlags", 1)) for _ in range(2))
    packed = ops.lookup_packed(put(VALUES), put(SCALES), put(IDS), stream=one)
    values, scales = ops.stage_mxfp8(packed, stream=other)
    expected = reference.stage_mxfp8(reference.lookup_packed(VALUES, SCALES, IDS), 256)
    np.testing.assert_array_equal(values.copy_to_host(), expected[0])
    np.testing.assert_array_equal(scales.copy_to_host(), expected[1])
    del packed, values, scales
    gc.collect()
    for stream in (one, other):
        cuda("cudaStreamDestroy", stream)


@pytest.mark.gpu
def test_first_hash_of_a_layout_under_capture():
    """Constants of a layout go to the GPU in its first call, which a capture cannot hold."""
    import torch

    tokens = generators.tokens(np.random.default_rng(2), [4])
    layout = reference.Layout([5], 4, 2, 700, generators.COMPRESSED_SIZE)
    put = Torch().put
    inputs = [
        put(array)
        for array in (
            generators.small_token_map(),
            tokens.token_ids,
            tokens.positions,
            tokens.cu_seqlens,
        )
    ]
    out = put(np.zeros((4, 1, 6), np.int32))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(graph),
        pytest.raises(InputError, match="expected an earlier call"),
    ):
        ops.hash_ids(layout, *inputs, out=out)


@pytest.mark.gpu
def test_out_of_device_arrays_under_capture():
    from trtllm_engram.runtime.device_array import constant, cuda

    inputs = [DeviceArrays().put(array) for array in (VALUES, SCALES, IDS)]
    stream = int(cuda("cudaStreamCreateWithFlags", 1))
    ops.lookup(*inputs, stream=stream)
    mode = constant("cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal")
    cuda("cudaStreamBeginCapture", stream, mode)
    try:
        with pytest.raises(InputError, match="out: expected an array under stream capture"):
            ops.lookup(*inputs, stream=stream)
    finally:
        cuda("cudaGraphDestroy", cuda("cudaStreamEndCapture", stream))
        cuda("cudaStreamDestroy", stream)


@pytest.mark.parametrize("name", ["stream", "op", "self", "arrays"])
def test_tensors_of_any_name(name):
    """Engines name them as they like."""
    call = Call("engine", None, **{name: IDS})
    assert call.input(name, ("int32",), (5, 2)).pointer == IDS.ctypes.data


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "int64", "bool"])
def test_results_of_every_type_of_engines(dtype):
    """Without torch too."""
    made = Call("engine", None, ids=IDS).result("out", _ARRAY_DTYPES[dtype], (3, 5))
    assert (made.array.dtype.name, made.array.shape) == (dtype, (3, 5))
