# SPDX-License-Identifier: Apache-2.0
"""A module `tensorrt` whose networks are evaluated in numpy, plugins by the CPU ops: a model can be
run where there is no TensorRT, nor a GPU."""

from __future__ import annotations

import ctypes
import itertools
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import reference
from paged_kv import UNUSED_BLOCK

from trtllm_engram.builder.dtypes import TENSORRT, numpy_dtype
from trtllm_engram.plugins.registration import plugin_fields
from trtllm_engram.runtime import ops

TYPES = {theirs: numpy_dtype(ours) for ours, theirs in TENSORRT.items()}


@dataclass
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    value: Callable[[dict[int, np.ndarray]], np.ndarray]
    sizes: tuple[int, ...] = ()  # of a shape tensor: the shape that it holds, -1 where unknown

    def set_dimension_name(self, index: int, name: str) -> None:
        assert self.shape[index] == -1
        assert name

    def evaluate(self, known: dict[int, np.ndarray]) -> np.ndarray:
        if id(self) not in known:
            known[id(self)] = self.value(known)
        return known[id(self)]


@dataclass
class Layer:
    """A layer with one function of its inputs' values, which gives all its outputs."""

    network: Network
    name: str
    inputs: list[Tensor]
    function: Callable[..., Any]
    shapes: list[tuple[str, tuple[int, ...]]]
    plugin: Any = None
    outputs: list[Tensor] = field(default_factory=list)
    reshape_dims: Any = None
    mode: Any = None

    def __post_init__(self) -> None:
        self.network.layers.append(self)
        for index, (dtype, shape) in enumerate(self.shapes):
            self.outputs.append(
                Tensor("", dtype, shape, lambda known, i=index: self._run(known)[i])
            )

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "reshape_dims" and value is not None:
            self.outputs[0].shape = tuple(value)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def get_output(self, index: int) -> Tensor:
        return self.outputs[index]

    def set_input(self, index: int, tensor: Tensor) -> None:
        assert index >= len(self.inputs)  # the stride of a slice is never set
        self.inputs.append(tensor)
        self.outputs[0].shape = tensor.sizes or self.outputs[0].shape

    def _run(self, known: dict[int, np.ndarray]) -> Any:
        results = self.function(*(tensor.evaluate(known) for tensor in self.inputs))
        for tensor, result in zip(self.outputs, results, strict=True):
            assert result.dtype == TYPES[tensor.dtype]
        return results


class Network:
    """An INetworkDefinition. `tables` binds names for EngramLookup; `gather` gives, for
    a rank's part of a tensor, those of all ranks."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.constants: list[Weights] = []
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.tables: Mapping[str, Any] = {}
        self.gather: Callable[[np.ndarray], list[np.ndarray]] | None = None

    def add(self, function: Any, inputs: list[Tensor], *shapes: Any) -> Layer:
        return Layer(self, f"layer {len(self.layers)}", inputs, function, list(shapes))

    def add_input(self, name: str, dtype: str, shape: Any) -> Tensor:
        made = self.inputs[name] = Tensor(name, dtype, tuple(shape), lambda known: None)
        return made

    def add_constant(self, shape: Any, weights: Any) -> Layer:
        self.constants.append(weights)
        array = weights.array().reshape(shape)
        return self.add(lambda: (array,), [], (weights.dtype, tuple(shape)))

    def add_identity(self, x: Tensor) -> Layer:
        return self.add(lambda value: (value,), [x], (x.dtype, x.shape))

    def add_shuffle(self, x: Tensor) -> Layer:
        def run(value: np.ndarray, shape: np.ndarray | None = None) -> Any:
            return (value.reshape(layer.reshape_dims if shape is None else tuple(shape)),)

        layer = self.add(run, [x], (x.dtype, x.shape))
        return layer

    def add_shape(self, x: Tensor) -> Layer:
        layer = self.add(lambda a: (np.array(a.shape),), [x], ("INT64", (len(x.shape),)))
        layer.get_output(0).sizes = x.shape
        return layer

    def add_slice(self, x: Tensor, start: Any, shape: Any, stride: Any) -> Layer:
        """Of stride 1; in mode FILL the inputs are start, shape and the value past the end."""
        assert set(stride) == {1}

        def run(value: np.ndarray, *given: np.ndarray) -> Any:
            begin, sizes, fill = given or (start, shape, 0)
            part = value[tuple(slice(b, b + size) for b, size in zip(begin, sizes, strict=True))]
            assert part.shape == tuple(sizes) or layer.mode == "FILL"
            whole = np.full(tuple(sizes), fill, value.dtype)
            whole[tuple(map(slice, part.shape))] = part
            return (whole,)

        sizes = tuple(shape) if any(shape) else x.shape
        layer = self.add(run, [x], (x.dtype, sizes))
        return layer

    def add_elementwise(self, a: Tensor, b: Tensor, operation: str) -> Layer:
        assert operation == "PROD"
        return self.add(lambda x, y: (x * y,), [a, b], (a.dtype, a.shape))

    def add_concatenation(self, inputs: list[Tensor]) -> Layer:
        size = sum(tensor.shape[0] for tensor in inputs)
        return self.add(
            lambda *values: (np.concatenate(values),), inputs, (inputs[0].dtype, (size,))
        )

    def add_plugin_v3(self, inputs: list[Tensor], shape_inputs: Any, plugin: Any) -> Layer:
        assert shape_inputs == []
        run, shapes = PLUGINS[plugin.name](plugin.fields, *inputs)
        layer = self.add(lambda *values: run(self.tables, *values), inputs, *shapes)
        layer.plugin = plugin
        return layer

    def mark_output(self, tensor: Tensor) -> None:
        self.outputs[tensor.name] = tensor

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert feeds.keys() == self.inputs.keys()
        known = {}
        for name, tensor in self.inputs.items():
            assert feeds[name].dtype == TYPES[tensor.dtype], name
            assert feeds[name].ndim == len(tensor.shape), name
            known[id(tensor)] = feeds[name]
        return {name: tensor.evaluate(known) for name, tensor in self.outputs.items()}


@dataclass
class Weights:
    dtype: str
    address: int
    size: int

    def array(self) -> np.ndarray:
        dtype = TYPES[self.dtype]
        return np.frombuffer(ctypes.string_at(self.address, self.size * dtype.itemsize), dtype)


def at(address: int, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes at an address, to be written."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * math.prod(shape)).from_address(address)).reshape(
        shape
    )


def paged_hash_plugin(fields: Any, token_ids: Tensor, *rest: Tensor) -> Any:
    """As cpp/plugins/paged_hash.cpp finds the pools and the kinds of requests."""
    multipliers, _, offsets = rest[-3:]
    num_layers, num_columns = offsets.shape
    shapes = [("INT32", (-1, num_layers, num_columns)), *[("INT32", (-1,))] * 2]
    shapes.append(("INT32", (-1, multipliers.shape[1] - 1)))

    def run(_: Any, ids: Any, token_map: Any, pointers: Any, mapping: Any, *rest: Any) -> Any:
        blocks, lengths, contexts, beams, types, host_lengths, multipliers, primes, offsets = rest
        pool, layer = mapping[0]
        block = (fields["tokens_per_block"], fields["slot_bytes"])
        count = 1 + int((blocks[pool] & 2**31 - 1)[blocks[pool] != UNUSED_BLOCK].max())
        pools = [
            at(int(address) + 2 * int(layer) * math.prod(block), (count, *block))
            for address in pointers[pool]
        ]
        num_contexts = int((types == 0).sum())
        layout = layout_of(fields, multipliers, primes, offsets)
        past = ops.history(
            pools[0],
            np.ascontiguousarray(blocks[pool]),
            lengths,
            contexts,
            ids,
            num_contexts=num_contexts,
            num_context_tokens=int(host_lengths[:num_contexts].sum()),
            max_ngram_size=multipliers.shape[1],
            secondary_pool=pools[1],
            cache_indirection=beams if beams.shape[1] > 1 else None,
        )
        return (ops.hash_ids(layout, token_map, ids, *past), *past)

    return run, shapes


def layout_of(fields: Any, multipliers: Any, primes: Any, offsets: Any) -> SimpleNamespace:
    shape = (len(multipliers), multipliers.shape[1] - 1, -1)
    return SimpleNamespace(
        config=SimpleNamespace(pad_token_id=fields["pad_token_id"]),
        multipliers=multipliers,
        primes=primes.reshape(shape),
        offsets=offsets,
    )


def hash_plugin(fields: Any, token_ids: Tensor, *rest: Tensor) -> Any:
    if fields["history"] == "kv_phantom":
        return paged_hash_plugin(fields, token_ids, *rest)
    explicit = fields["history"] == "explicit"
    multipliers, _, offsets = rest[-3:]
    num_layers, num_columns = offsets.shape
    shapes = [("INT32", (token_ids.shape[0], num_layers, num_columns))]
    if fields["has_next_lookback"]:
        shapes.append(("INT32", (-1, multipliers.shape[1] - 1)))

    def run(_: Any, ids: Any, positions: Any, bounds: Any, token_map: Any, *rest: Any) -> Any:
        lookback = rest[0] if explicit else None
        multipliers, primes, offsets = rest[-3:]
        orders = multipliers.shape[1] - 1
        layout = layout_of(fields, multipliers, primes, offsets)
        hashed = ops.hash_ids(layout, token_map, ids, positions, bounds, lookback)
        if not fields["has_next_lookback"]:
            return (hashed,)
        spans = list(itertools.pairwise(bounds))
        tokens = SimpleNamespace(token_ids=ids, spans=spans, lookback_ids=lookback)
        return hashed, reference.next_lookback(tokens, orders)

    return run, shapes


def lookup_plugin(fields: Any, ids: Tensor) -> Any:
    def run(tables: Any, ids: Any) -> Any:
        store, layer = tables[fields["table"]]
        assert (fields["fingerprint"], fields["layer"]) == (store.manifest.fingerprint, layer)
        table = store.table(layer)
        columns = np.ascontiguousarray(ids[:, fields["layer_idx"]])
        if fields["output"] == "bf16":
            return (ops.lookup(table.values, table.scales, columns),)
        order = fields["output"].removeprefix("mxfp8_")
        packed = ops.lookup_mxfp8(table.values, table.scales, columns, scale_order=order)
        return tuple(array.view(np.int32) for array in packed)

    num_values = ids.shape[2] * fields["head_dim"]
    if fields["output"] == "bf16":
        return run, [("BF16", (ids.shape[0], num_values))]
    assert fields["values"] == "words"
    linear = fields["output"] == "mxfp8_linear"
    scales = (ids.shape[0], num_values // 128) if linear else (-1,)
    return run, [("INT32", (ids.shape[0], num_values // 4)), ("INT32", scales)]


def project_plugin(fields: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Any:
    laid_back = {"row_major": lambda laid: laid, "sm90_v1": reference.row_major_of_sm90_v1}

    def run(_: Any, x: Any, weight: Any, scale: Any) -> Any:
        blocks = tuple(-(-size // 32) for size in (len(weight), x.shape[1]))
        scales = scale.view(np.uint8)[: blocks[0] * blocks[1]].reshape(blocks)
        plain = laid_back[fields["weight_layout"]](weight.view(np.uint8))
        return (ops.project(x, plain, scales),)

    return run, [("BF16", (x.shape[0], weight.shape[0]))]


def gate_plugin(fields: Any, hidden: Tensor, *rest: Tensor) -> Any:
    def run(_: Any, hidden: Any, kv: Any, query: Any, key: Any) -> Any:
        return (ops.gate(hidden, kv, query, key, fields["eps"]),)

    return run, [(hidden.dtype, hidden.shape)]


PLUGINS = {
    "EngramHash": hash_plugin,
    "EngramLookup": lookup_plugin,
    "EngramProject": project_plugin,
    "EngramGate": gate_plugin,
}


class Creator:
    """Takes what a creator of the library takes, as it declares its fields."""

    def create_plugin(self, name: str, collection: Any, phase: str) -> Any:
        assert phase == "BUILD"
        fields = {one.name: one.default for one in plugin_fields()[name].values()}
        for one in collection:
            text = bytes(one.data).rstrip(b"\0").decode() if one.type == "CHAR" else None
            fields[one.name] = one.data[0].item() if text is None else text
        return SimpleNamespace(name=name, fields=fields)


class Registry:
    def __init__(self) -> None:
        self.libraries: list[str] = []

    def load_library(self, path: str) -> None:
        self.libraries.append(path)

    def get_creator(self, name: str, version: str, namespace: str) -> Creator | None:
        return Creator() if self.libraries else None


def make() -> types.ModuleType:
    module: Any = types.ModuleType("tensorrt")
    registry = Registry()
    kinds = {name: name for name in (*TYPES, "INT8")}
    module.__version__ = "10.6.0"
    module.DataType = SimpleNamespace(**kinds)
    module.SampleMode = SimpleNamespace(FILL="FILL")
    module.ElementWiseOperation = SimpleNamespace(PROD="PROD")
    module.int32 = "INT32"
    module.Weights = Weights
    module.TensorRTPhase = SimpleNamespace(BUILD="BUILD")
    module.PluginFieldType = SimpleNamespace(INT32="INT32", FLOAT32="FLOAT32", CHAR="CHAR")
    module.PluginField = lambda *field: SimpleNamespace(
        **dict(zip(("name", "data", "type"), field, strict=True))
    )
    module.PluginFieldCollection = list
    module.get_plugin_registry = lambda: registry
    return module
