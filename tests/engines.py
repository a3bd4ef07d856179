# SPDX-License-Identifier: Apache-2.0
"""Stores with tables of one's choice, and engines of small networks, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import shard_of, small_checkpoint
from kept_plans import kept_plan

from trtllm_engram.builder.layers import FP8_CAPABILITY
from trtllm_engram.builder.prepare import prepare
from trtllm_engram.builder.safetensors_file import read_header
from trtllm_engram.runtime import Store, open_store

# Row ids of 24 columns of 256 values, as V4.1 has them, in tables of a megabyte.
V4_COLUMNS: dict[str, Any] = {
    "engram_vocab_size": 173,
    "hidden_size": 160,
    "hc_mult": 4,
    "n_heads": 8,
    "head_dim": 256,
    "max_ngram_size": 4,
}

# A text with every word of small_tokenizer: the built-in one has hardly any of them.
TEXT = " ".join(map(str, np.random.default_rng(9).integers(0, 40, 500))) + " a A pad"


def on_gpu(test: Any) -> Any:
    """Marks a test that builds engines."""
    return pytest.mark.gpu(pytest.mark.engine(test))


def skip_without_fp8() -> None:
    """For tests of TensorRT's products in FP8."""
    from trtllm_engram.builder.engine import EngineBuilder

    if EngineBuilder().capability < FP8_CAPABILITY:
        pytest.skip("this machine: its GPU has no products in FP8")


def small_store(folder: Path, **changes: Any) -> Store:
    """A store of a small checkpoint beside it."""
    checkpoint = small_checkpoint(folder / "checkpoint", **changes)
    prepare(checkpoint, folder / "store")
    return open_store(folder / "store")


def tensor_bytes(checkpoint: Path, name: str) -> np.memmap:
    """The bytes of a checkpoint's tensor [rows, bytes of a row], to be written."""
    full_name = f"layers.{name}"
    entry = read_header(shard_of(checkpoint, full_name))[full_name]
    shape = (entry.shape[0], entry.nbytes // entry.shape[0])
    return np.memmap(entry.file, np.uint8, "r+", entry.offset, shape)


def flip_byte(values, scales, row):
    values[row, 7] ^= 0x80


def swap_rows(values, scales, row):
    other = (row + 1) % len(values)
    values[[row, other]] = values[[other, row]]
    scales[[row, other]] = scales[[other, row]]


def raise_scales(values, scales, row):
    scales[:] += 1


WRONG = {
    "one byte flipped": flip_byte,
    "one row swapped": swap_rows,
    "scales off by one": raise_scales,
}


def wrong_store(folder: Path, spoil: Any, layer: int, row: int, **changes: Any) -> Store:
    """small_store whose table is wrong in its bytes alone: the layout is the same."""
    checkpoint = small_checkpoint(folder / "checkpoint", **changes)
    values = tensor_bytes(checkpoint, f"{layer}.engram.embed.weight")
    scales = tensor_bytes(checkpoint, f"{layer}.engram.embed.scale")
    spoil(values, scales, row)
    values.flush()
    scales.flush()
    prepare(checkpoint, folder / "store")
    return open_store(folder / "store")


class SmallEngine:
    """An engine of make(network, **inputs) -> {name: tensor}; the first axis of every input is
    dynamic, from 0 (or `least` of its name) to the size that the input has here."""

    def __init__(
        self, make: Any, inputs: dict[str, np.ndarray], least=None, in_place=False
    ) -> None:
        from trtllm_engram.runtime.engine import Engine

        self.plan = kept_plan(lambda: _build(make, inputs, least or {}, in_place))
        self.engine = Engine(self.plan)
        self._execution = None

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self._execution is None:
            self._execution = self.engine.execution()
        return self._execution.run(inputs)


def _build(make: Any, inputs: dict[str, np.ndarray], least: Any, in_place: bool) -> bytes:
    from trtllm_engram.builder import network
    from trtllm_engram.builder.engine import EngineBuilder

    builder = EngineBuilder()
    if in_place:
        builder.allow_in_place()
    tensors = {
        name: network.add_input(
            builder.network, name, array.dtype.name, (f"{name}_size", *array.shape[1:])
        )
        for name, array in inputs.items()
    }
    for name, tensor in make(builder.network, **tensors).items():
        network.mark_output(builder.network, name, tensor)
    most = {name: array.shape for name, array in inputs.items()}
    lowest = {name: (least.get(name, 0), *shape[1:]) for name, shape in most.items()}
    builder.add_profile(lowest, most, most)
    return bytes(builder.serialize())


def run_network(make: Any, inputs: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    return SmallEngine(make, inputs, **options).run(inputs)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
