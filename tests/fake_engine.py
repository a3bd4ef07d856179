# SPDX-License-Identifier: Apache-2.0
"""An engine in name, of a model in fake_tensorrt's networks: what is done with engines can be
tested where none can be built."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import fake_tensorrt
import numpy as np
import pytest

from trtllm_engram.builder.dtypes import TENSORRT
from trtllm_engram.builder.graph import NetworkGraph
from trtllm_engram.builder.layers import engram_layers, table_name
from trtllm_engram.builder.model import ModelOptions, add_model, input_shapes
from trtllm_engram.plugins.registration import plugin_fields, register
from trtllm_engram.runtime import Store
from trtllm_engram.runtime.engine import Engine, TensorInfo


def use_fake_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FakeEngine's networks are made of."""
    if not plugin_fields():
        pytest.skip("a CPU-only library has no plugins")
    trt = fake_tensorrt.make()
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    register(trt)


class FakeEngine(Engine):
    """Has one profile; `tables`: the stores of layers whose table is not the store's own."""

    def __init__(
        self,
        store: Store,
        options: ModelOptions,
        tables: Mapping[int, Store] | None = None,
        max_tokens: int = 64,
    ) -> None:
        self.device, self.num_profiles = 0, 1
        self._net = fake_tensorrt.Network()
        add_model(NetworkGraph(self._net), store, engram_layers(store), options)
        self._net.tables = {
            table_name(layer_id): ((tables or {}).get(layer_id, store), layer_id)
            for layer_id in store.config.layer_ids
        }
        self.inputs, self.outputs = map(_infos, (self._net.inputs, self._net.outputs))
        self._ranges = [input_shapes(store, options, size, size) for size in (0, max_tokens)]

    def execution(self, profile: int = 0) -> Any:
        assert profile == 0
        return SimpleNamespace(run=self._run)

    def shape_range(self, name: str, profile: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        assert profile == 0
        least, most = (shapes[name] for shapes in self._ranges)
        return least, most

    def _run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name, array in inputs.items():
            self.check_shape(name, array.shape, 0)
        return self._net.run(inputs)


def _infos(tensors: Mapping[str, fake_tensorrt.Tensor]) -> dict[str, TensorInfo]:
    ours = {theirs: name for name, theirs in TENSORRT.items()}
    return {
        name: TensorInfo(ours[tensor.dtype], tuple(None if d < 0 else d for d in tensor.shape))
        for name, tensor in tensors.items()
    }
