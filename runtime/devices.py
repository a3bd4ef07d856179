# SPDX-License-Identifier: Apache-2.0
"""Which device to run on."""

from __future__ import annotations

import importlib.util
import re

from trtllm_engram.plugins.errors import EngramError, InputError

from . import _native
from .gpus import probe_driver

AUTO = "auto"
CPU = "cpu"


def why_no_gpu() -> str:
    """Why ops and engines cannot run on a GPU here, in a few words; "" where they can."""
    if why := _why_library_has_none():
        return why
    if importlib.util.find_spec("cuda") is None:
        return "cuda-bindings is missing: pip install cuda-bindings"
    return ""


def num_gpus() -> int:
    """GPUs that the library can use, with or without CUDA's Python package."""
    return 0 if _why_library_has_none() else len(probe_driver().gpus)


def require_gpu(what: str) -> None:
    """EngramError where there is no GPU for `what`."""
    if why := why_no_gpu():
        raise EngramError(f"{what}: expected a usable GPU: {why}")


def _why_library_has_none() -> str:
    driver = probe_driver()
    if driver.error:
        return driver.error
    if not driver.gpus:
        return "the driver shows no GPU"
    info = _native.build_info()
    if not info["cuda"]:
        return "the library is a CPU-only build"
    if driver.cuda_version < (int(info["cuda"].partition(".")[0]), 0):
        major, minor = driver.cuda_version
        return (
            f"the library needs driver {info['minimum_driver']} or newer, found "
            f"{driver.version or 'one'} for CUDA {major}.{minor}"
        )
    return ""


def choose_device(device: str) -> str:
    """`device` itself, or for "auto" the first GPU where one can be used, else the CPU."""
    if device == AUTO:
        return CPU if why_no_gpu() else "cuda:0"
    ordinal = parse_device(device)
    if ordinal is not None:
        require_gpu(device)
        count = num_gpus()
        if ordinal >= count:
            raise InputError(f"device: expected cuda:N below cuda:{count}, found {device!r}")
    return device


def parse_device(device: str) -> int | None:
    """The CUDA ordinal, None for the CPU."""
    if device == CPU:
        return None
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", device)
    if match is None:
        raise InputError(f"device: expected cpu or cuda:N, found {device!r}")
    return int(match[1] or 0)
