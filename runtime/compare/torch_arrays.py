# SPDX-License-Identifier: Apache-2.0
"""numpy arrays and torch tensors on the CPU with the same memory, BF16 included."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_engram.plugins.errors import EngramError

Host = npt.NDArray[Any]


def to_numpy(array: Any) -> Host:
    """An array as numpy's, of the same memory where it lies on the CPU. BF16 comes as a tensor or,
    where torch is missing, as uint16 bits: no output of ours is of that type otherwise."""
    if isinstance(array, np.ndarray):
        return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array
    torch = importlib.import_module("torch")
    tensor = array.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        bits: Host = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return bits
    if tensor.dtype.is_floating_point and tensor.element_size() == 1:  # FP8, unknown to numpy
        tensor = tensor.view(torch.uint8)
    other: Host = tensor.numpy()
    return other


def as_input(array: Host) -> Any:
    """The array, or for BF16, which polygraphy knows in torch alone, a tensor of its memory."""
    if array.dtype != ml_dtypes.bfloat16:
        return array
    torch = _torch()
    if torch is None:
        raise EngramError(
            "BF16 in polygraphy: expected the package torch, found none: pip install torch"
        )
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)


def as_output(array: Host) -> Any:
    """The same, but bits where torch is missing."""
    if array.dtype == ml_dtypes.bfloat16 and _torch() is None:
        return array.view(np.uint16)
    return as_input(array)


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None
