# SPDX-License-Identifier: Apache-2.0
"""The demo's work: a small model in V4.1's shape is made, prepared, run over a text, and checked.

`trtllm-engram demo` prints the Report that `run_demo` returns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_engram.builder import EngramConfig
from trtllm_engram.builder.prepare import prepare
from trtllm_engram.builder.synthesize import synthesize

from . import demo_check, ops
from .compare.report import HIDDEN_LIMIT_BF16_ULPS
from .data_files import flash_layout, golden_hash, multilingual_text
from .demo_engine import run_engine, why_no_tensorrt
from .devices import CPU, why_no_gpu
from .hidden import HostArray, SeededHidden
from .row import packed_row_bytes
from .session import EngramSession, Step
from .store import Store, open_store
from .text import encode

ENGRAM_VOCAB_SIZE = 14_000  # with V4.1's other sizes: tables of 182 MB, 0.5 GB in all
GPU = "cuda:0"
_LIMIT_ULPS = 1.0
_CHUNK = 7  # tokens; does not divide the text
_REPEATS = 5
_LONG_S = 0.5  # what takes longer is timed once


@dataclass(frozen=True)
class Timing:
    """One step over all layers on one device: how long it took and what it did in that time."""

    seconds: float
    work: float
    unit: str  # of work


@dataclass(frozen=True)
class Check:
    """One step held against a reference. `limit` None: the bits must be the same."""

    step: str
    reference: str
    error: float  # ulps, or the number of values that differ
    limit: float | None
    timings: dict[str, Timing] = field(default_factory=dict)  # by device

    @property
    def passed(self) -> bool:
        return self.error <= (self.limit or 0)


@dataclass(frozen=True)
class Report:
    config: EngramConfig
    folder: Path
    checkpoint_bytes: int
    synthesize_seconds: float
    prepare_seconds: float
    num_tokens: int
    num_rows: int
    num_unique_rows: int
    checks: list[Check]
    not_run: dict[str, str]  # parts that had no part in it, and why

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def run_demo(
    folder: Path,
    note: Callable[[str], None],
    *,
    engram_vocab_size: int = ENGRAM_VOCAB_SIZE,
    hidden_size: int = 5120,
) -> Report:
    """Makes folder/checkpoint and folder/store and runs them; `note` hears what comes next."""
    checkpoint, store_path = folder / "checkpoint", folder / "store"
    note("writing a checkpoint")
    started = time.perf_counter()
    synthesize(checkpoint, engram_vocab_size=engram_vocab_size, hidden_size=hidden_size)
    synthesized = time.perf_counter()
    note("preparing a store")
    prepare(checkpoint, store_path)
    prepared = time.perf_counter()
    store = open_store(store_path)
    token_ids = encode(store.tokenizer_json, multilingual_text())
    no_gpu = why_no_gpu()
    runs = {}
    for device in [CPU] if no_gpu else [CPU, GPU]:
        note(f"running on {device}")
        runs[device] = _Run(store, token_ids, device)
    note("checking against numpy")
    checks = _check_all(store, token_ids, runs)
    no_engine = no_gpu or why_no_tensorrt()
    if not no_engine:
        note("building and running a TensorRT engine")
        checks.append(_check_engine(store, folder, token_ids))
    return Report(
        config=store.config,
        folder=folder,
        checkpoint_bytes=sum(file.stat().st_size for file in checkpoint.iterdir()),
        synthesize_seconds=synthesized - started,
        prepare_seconds=prepared - synthesized,
        num_tokens=token_ids.size,
        num_rows=runs[CPU].hash_ids.size,
        num_unique_rows=sum(np.unique(ids).size for ids in runs[CPU].hash_ids.swapaxes(0, 1)),
        checks=checks,
        not_run=_not_run(no_gpu, no_engine),
    )


class _Run:
    """Every step over all layers on one device, with its time."""

    def __init__(self, store: Store, token_ids: demo_check.Ids, device: str) -> None:
        config, num_tokens = store.config, token_ids.size
        self._session = session = EngramSession(store, device)
        self.timings: dict[str, Timing] = {}

        def timed(name: str, work: float, unit: str, function: Callable[[], Any]) -> Any:
            result, seconds = self._measure(function)
            self.timings[name] = Timing(seconds, work * num_tokens * config.num_layers, unit)
            return result

        def each_layer(function: Callable[[int], Any]) -> Callable[[], dict[int, Any]]:
            return lambda: {layer_id: function(layer_id) for layer_id in config.layer_ids}

        row_bytes = packed_row_bytes(config.row_dim)
        gate_bytes = 2 * (2 * config.hc_mult * config.hidden_size + config.kv_dim)
        make_hidden = SeededHidden(config)
        hidden = each_layer(lambda i: session.to_device(make_hidden(i, 0, num_tokens)))()
        step = timed("hash", 1, "pairs", lambda: self._step(token_ids))
        rows = timed("lookup", row_bytes, "B", each_layer(lambda i: session.rows(i, step)))
        kv = timed(
            "project",
            2 * config.kv_dim * config.row_dim,
            "FLOP",
            each_layer(lambda i: session.project(i, rows[i])),
        )
        out = timed(
            "gate", gate_bytes, "B", each_layer(lambda i: session.gate(i, hidden[i], kv[i]))
        )
        self.hash_ids: demo_check.Ids = session.to_host(step.hash_ids)
        self.hidden, self.rows, self.kv, self.out = (
            {layer_id: session.to_host(array) for layer_id, array in arrays.items()}
            for arrays in (hidden, rows, kv, out)
        )

    def hash_in_chunks(self, token_ids: demo_check.Ids) -> demo_check.Ids:
        self._session.forget()
        parts = [
            self._session.to_host(self._session.step(token_ids[start : start + _CHUNK]).hash_ids)
            for start in range(0, token_ids.size, _CHUNK)
        ]
        return np.concatenate(parts)

    def _step(self, token_ids: demo_check.Ids) -> Step:
        self._session.forget()
        return self._session.step(token_ids)

    def _measure(self, function: Callable[[], Any]) -> tuple[Any, float]:
        """(result, seconds): the median of some calls after a first one, or a first long one's."""

        def call() -> tuple[Any, float]:
            started = time.perf_counter()
            result = function()
            self._session.synchronize()
            return result, time.perf_counter() - started

        result, first = call()
        if first >= _LONG_S:
            return result, first
        return result, statistics.median(call()[1] for _ in range(_REPEATS))


def _check_all(store: Store, token_ids: demo_check.Ids, runs: dict[str, _Run]) -> list[Check]:
    """Every device's results against one numpy reference; the worst of them counts."""
    ids = demo_check.hash_ids(store.layout, store.token_map, token_ids)
    devices = list(runs.values())

    def check(step: str, reference: str, errors: Iterable[float], limit: float | None) -> Check:
        timings = {device: run.timings[step] for device, run in runs.items() if step in run.timings}
        return Check(step, reference, max(errors), limit, timings)

    lookup_errors, project_errors, gate_errors = [], [], []
    for index, layer_id in enumerate(store.config.layer_ids):
        table, weights = store.table(layer_id), store.weights(layer_id)
        rows = demo_check.rows(table.values, table.scales, ids[:, index])
        kv = demo_check.projection(rows, weights.wkv_weight, weights.wkv_scale)
        kv_scale = np.maximum(np.abs(kv), np.sqrt(np.mean(kv * kv)))
        for run in devices:
            lookup_errors.append(_count_different(run.rows[layer_id], rows))
            project_errors.append(demo_check.max_ulps(run.kv[layer_id], kv, kv_scale))
            gate_errors.append(_gate_error(store, layer_id, run))
    golden_ids, golden_found = _golden(store)
    return [
        check("hash", "numpy", (_count_different(run.hash_ids, ids) for run in devices), None),
        check(
            f"  in chunks of {_CHUNK}",
            "one piece",
            (_count_different(run.hash_in_chunks(token_ids), ids) for run in devices),
            None,
        ),
        check("  at true size", "golden ids", [_count_different(golden_found, golden_ids)], None),
        check("lookup", "numpy", lookup_errors, None),
        check("project", "numpy, FP32", project_errors, _LIMIT_ULPS),
        check("gate", "numpy, FP64", gate_errors, _LIMIT_ULPS),
    ]


def _gate_error(store: Store, layer_id: int, run: _Run) -> float:
    # From the run's own keys and value: the projection's error is not the gate's.
    weights = store.weights(layer_id)
    expected, magnitude = demo_check.gate(
        run.hidden[layer_id],
        run.kv[layer_id],
        weights.q_weight,
        weights.k_weight,
        store.config.rms_norm_eps,
    )
    return demo_check.max_ulps(run.out[layer_id], expected, magnitude)


def _golden(store: Store) -> tuple[demo_check.Ids, demo_check.Ids]:
    """Row ids of a sentence at V4.1-Flash's true size: (expected, found)."""
    golden = golden_hash()
    token_ids = encode(store.tokenizer_json, golden["text"])
    found = ops.hash_ids(
        flash_layout(),
        store.token_map,
        token_ids,
        np.arange(token_ids.size, dtype=np.int64),
        np.array([0, token_ids.size], np.int32),
    )
    return np.array(golden["hash_ids"], np.int32), found


def _count_different(found: HostArray, expected: HostArray) -> int:
    if found.shape != expected.shape:
        return max(found.size, expected.size)
    bits = np.dtype(f"u{expected.dtype.itemsize}")
    return int(np.count_nonzero(found.view(bits) != expected.view(bits)))


def _check_engine(store: Store, folder: Path, token_ids: demo_check.Ids) -> Check:
    error, seconds = run_engine(store, folder, token_ids)
    work = float(token_ids.size * store.config.num_layers)
    timings = {GPU: Timing(seconds, work, "pairs")}
    return Check("TensorRT engine", "CPU ops", error, HIDDEN_LIMIT_BF16_ULPS, timings)


def _not_run(no_gpu: str, no_engine: str) -> dict[str, str]:
    parts = {"GPU": no_gpu} if no_gpu else {}
    if no_engine:
        parts["TensorRT"] = "an engine needs a usable GPU" if no_gpu else no_engine
    return parts
