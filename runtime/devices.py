# SPDX-License-Identifier: Apache-2.0
"""Which device to run on."""

from __future__ import annotations

import importlib.util

from . import _native
from .gpus import probe_driver

AUTO = "auto"
CPU = "cpu"


def why_no_gpu() -> str:
    """Why eager ops cannot run on a GPU here, in a few words; "" where they can."""
    driver = probe_driver()
    if driver.error:
        return driver.error
    if not driver.gpus:
        return "the driver shows no GPU"
    if not _native.build_info()["cuda"]:
        return "the library is a CPU-only build"
    if importlib.util.find_spec("cuda") is None:
        return "cuda-python is missing: pip install 'trtllm-engram[cuda]'"
    return ""


def choose_device(device: str) -> str:
    """`device` itself, or for "auto" the first GPU where one can be used, else the CPU."""
    if device != AUTO:
        return device
    return CPU if why_no_gpu() else "cuda:0"
