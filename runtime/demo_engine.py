# SPDX-License-Identifier: Apache-2.0
"""The demo's engine: the same layers built by TensorRT, replayed from a CUDA graph."""

from __future__ import annotations

import importlib.util
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.engine import build
from trtllm_engram.builder.model import ModelOptions, hidden_name
from trtllm_engram.plugins.errors import EngramError
from trtllm_engram.plugins.registration import TENSORRT_MODULES, import_tensorrt

from .compare import Reference, compare
from .device_array import DeviceArray, cuda
from .engine import Engine
from .hidden import SeededHidden
from .store import Store
from .tables import Tables

_REPEATS = 20


def why_no_tensorrt() -> str:
    """Why no engine can be built here, in a few words; "" where one can."""
    if not any(map(importlib.util.find_spec, TENSORRT_MODULES)):
        return "none is installed: pip install tensorrt"
    try:
        import_tensorrt()
    except EngramError as error:
        return str(error).removeprefix("TensorRT: ")
    return ""


def run_engine(store: Store, folder: Path, token_ids: npt.NDArray[np.int32]) -> tuple[float, float]:
    """(largest error of the streams in BF16 ulps, seconds): infinite where another bit differs."""
    plan = folder / "engine.plan"
    options = ModelOptions(check_outputs=True)
    build(store, plan, max_batch=8, max_tokens=max(8, token_ids.size), options=options)
    feed: dict[str, npt.NDArray[Any]] = {
        "token_ids": token_ids,
        "positions": np.arange(token_ids.size, dtype=np.int64),
        "cu_seqlens": np.array([0, token_ids.size], np.int32),
        "lookback_ids": np.full((1, store.config.max_ngram_size - 1), -1, np.int32),
    }
    hidden = SeededHidden(store.config)
    for layer_id in store.config.layer_ids:
        feed[hidden_name(layer_id)] = hidden(layer_id, 0, token_ids.size)
    with Tables.of_store(store, placement="device"):
        execution = Engine(plan).execution(profile=1)
        graph = execution.capture(
            {name: DeviceArray.from_host(array) for name, array in feed.items()}
        )
        seconds = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            graph.replay()
            cuda("cudaDeviceSynchronize")
            seconds.append(time.perf_counter() - started)
        found = {name: array.copy_to_host() for name, array in graph.outputs.items()}
    comparisons = compare(found, Reference(store)(feed))
    wrong = any(one.problem or (one.limit is None and not one.passed) for one in comparisons)
    worst = max(one.max_ulps for one in comparisons)
    return float("inf") if wrong else worst, statistics.median(seconds)
