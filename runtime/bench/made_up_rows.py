# SPDX-License-Identifier: Apache-2.0
"""Ids for tables that synthesize's formula fills, and the rows that lookups of them give."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder import EngramLayout
from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.formula import row_bytes

from .. import demo_check


def uniform_ids(
    layout: EngramLayout, num_tokens: int, rng: np.random.Generator
) -> npt.NDArray[np.int32]:
    """[T, C] for the first layer, each of its column's rows."""
    primes, offsets = layout.primes[0].ravel(), layout.offsets[0]
    rows = rng.integers(primes, size=(num_tokens, primes.size))
    ids: npt.NDArray[np.int32] = (rows + offsets).astype(np.int32)
    return ids


def made_up_rows(
    config: EngramConfig, layer_id: int, ids: npt.NDArray[np.int32], seed: int
) -> npt.NDArray[Any]:
    """BF16 [T, C*D] of ids [T, C]."""
    values, scales = row_bytes(config, layer_id, ids.ravel(), seed)
    return demo_check.rows(values, scales, np.arange(ids.size, dtype=np.int32).reshape(ids.shape))
