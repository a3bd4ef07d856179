# SPDX-License-Identifier: Apache-2.0
"""Tensors of Triton's Python backend as numpy arrays, and back.

Through DLPack: the backend's own conversions know no BF16 and, in releases as of 2024, make wrong
values of numpy 2's arrays. Text has no other way than those.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .. import dlpack

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_array(tensor: Any) -> npt.NDArray[Any]:
    """A copy of an input in host memory: what Triton hands out is aligned to nothing."""
    found = dlpack.read(tensor, None)
    dtype = _BFLOAT16 if found.dtype == _BFLOAT16.name else np.dtype(found.dtype)
    count = math.prod(found.shape)
    if count == 0:
        return np.empty(found.shape, dtype)
    content = ctypes.string_at(found.pointer, count * dtype.itemsize)
    return np.frombuffer(content, dtype).reshape(found.shape)


def to_tensor(pb: Any, name: str, array: npt.NDArray[Any]) -> Any:
    """An output; the array must not change any more."""
    array = np.ascontiguousarray(array)
    capsule = dlpack.export(
        array, array.ctypes.data, array.shape, array.dtype.name, device_type=dlpack.CPU
    )
    return pb.Tensor.from_dlpack(name, capsule)


def reads_text(pb: Any) -> bool:
    """Whether this backend understands this numpy. Where it does not, text ends its process."""
    sent = np.arange(1, 4, dtype=np.int32)
    try:
        return np.array_equal(to_tensor(pb, "numbers", sent).as_numpy(), sent)
    except Exception:
        return False
