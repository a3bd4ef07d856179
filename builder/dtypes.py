# SPDX-License-Identifier: Apache-2.0
"""Element types by numpy's names (ml_dtypes' included), and what others call them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

TENSORRT = {
    "bfloat16": "BF16",
    "float16": "HALF",
    "float32": "FLOAT",
    "float8_e4m3fn": "FP8",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOL",
}
# TensorProto's.
ONNX = TENSORRT | {"bfloat16": "BFLOAT16", "float16": "FLOAT16", "float8_e4m3fn": "FLOAT8E4M3FN"}
SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int32": "I32"}


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))
