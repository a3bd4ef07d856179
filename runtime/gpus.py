# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA driver and its GPUs as libcuda and NVML tell them: no CUDA context, no torch."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

_COMPUTE_MAJOR, _COMPUTE_MINOR, _SM_COUNT = 75, 76, 16  # CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    total_bytes: int
    free_bytes: int | None  # None: NVML is not there to ask
    pci_address: str


@dataclass(frozen=True)
class Driver:
    """What `probe_driver` found. `error` says why there is nothing to see."""

    version: str  # "580.95.05"; "" where NVML is missing
    cuda_version: tuple[int, int]
    gpus: tuple[Gpu, ...]
    error: str = ""


class _MemoryInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def probe_driver(libcuda: str = "libcuda.so.1", libnvml: str = "libnvidia-ml.so.1") -> Driver:
    """Asks the driver; a machine without one is a Driver with no GPUs and an error that says so."""
    nothing = Driver("", (0, 0), ())
    try:
        cuda = ctypes.CDLL(libcuda)
    except OSError:
        return _with_error(nothing, f"no CUDA driver ({libcuda} not found)")
    nvml = _open_nvml(libnvml)
    version = _driver_version(nvml)
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    driver = Driver(version, (number.value // 1000, number.value % 1000 // 10), ())
    status = cuda.cuInit(0)
    if status != 0:
        return _with_error(driver, f"cuInit failed: {_error_text(cuda, status)}")
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    gpus = tuple(_describe(cuda, nvml, index) for index in range(count.value))
    return Driver(driver.version, driver.cuda_version, gpus)


def current_context(libcuda: str = "libcuda.so.1") -> int | None:
    """This thread's CUDA context, None where it has none. Loads no driver."""
    cuda = _loaded(libcuda)
    context = ctypes.c_void_p()
    if cuda is None or cuda.cuCtxGetCurrent(ctypes.byref(context)) != 0:
        return None
    return context.value


def use_context(context: int | None, libcuda: str = "libcuda.so.1") -> None:
    """Makes another thread's context this thread's, and with it that thread's choice of a GPU."""
    cuda = _loaded(libcuda)
    if context is not None and cuda is not None:
        cuda.cuCtxSetCurrent(ctypes.c_void_p(context))


def _loaded(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def _with_error(driver: Driver, error: str) -> Driver:
    return Driver(driver.version, driver.cuda_version, driver.gpus, error)


def _open_nvml(name: str) -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL(name)
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == 0 else None


def _driver_version(nvml: ctypes.CDLL | None) -> str:
    text = ctypes.create_string_buffer(96)
    if nvml is None or nvml.nvmlSystemGetDriverVersion(text, len(text)) != 0:
        return ""
    return text.value.decode()


def _error_text(cuda: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    if cuda.cuGetErrorString(status, ctypes.byref(text)) != 0 or text.value is None:
        return f"error {status}"
    return text.value.decode()


def _describe(cuda: ctypes.CDLL, nvml: ctypes.CDLL | None, index: int) -> Gpu:
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGetName(name, len(name), device)
    total = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    address = ctypes.create_string_buffer(32)
    cuda.cuDeviceGetPCIBusId(address, len(address), device)
    return Gpu(
        index=index,
        name=name.value.decode(),
        compute_capability=(attribute(_COMPUTE_MAJOR), attribute(_COMPUTE_MINOR)),
        num_sms=attribute(_SM_COUNT),
        total_bytes=total.value,
        free_bytes=_free_bytes(nvml, address.value),
        pci_address=address.value.decode().lower(),
    )


def _free_bytes(nvml: ctypes.CDLL | None, pci_address: bytes) -> int | None:
    if nvml is None:
        return None
    handle = ctypes.c_void_p()  # by address: NVML's order is not CUDA_VISIBLE_DEVICES'
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_address, ctypes.byref(handle)) != 0:
        return None
    info = _MemoryInfo()
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(info)) != 0:
        return None
    return int(info.free)
