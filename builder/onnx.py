# SPDX-License-Identifier: Apache-2.0
"""The layers of a store as an ONNX model, whose nodes TensorRT's parser turns into our plugins.

    export(open_store("store"), "engram.onnx")
    trtexec --onnx=engram.onnx --stronglyTyped --staticPlugins=$(trtllm-engram library-path) \\
        --minShapes=... --optShapes=... --maxShapes=...

Without shapes trtexec makes every dynamic size 1, and a cu_seqlens of one number is no request at
all. It needs tables and some inputs too; examples/polygraphy has all of that written out.

Inputs and outputs are those of model.py. The nodes' domain is trt.plugins: the parser ignores it,
and checkers leave nodes of other domains than ONNX's own alone.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_engram.builder import nodes
from trtllm_engram.builder.dtypes import ONNX
from trtllm_engram.builder.files import write_aside, write_at
from trtllm_engram.builder.layers import ModelStore, engram_layers
from trtllm_engram.builder.model import ModelOptions, add_model
from trtllm_engram.builder.nodes import Host, Node
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.plugins.registration import NAMESPACE, VERSION

DOMAIN = "trt.plugins"
_OPSET = 18
_IR_VERSION = 9  # TensorRT 10.6 reads up to 10
_PRODUCER = "trtllm-engram"
_MOST_INLINE_BYTES = 1 << 31  # of a protobuf message
_EXTERNAL_FROM_BYTES = 1024
_ALIGNMENT = 4096


def export(
    store: ModelStore,
    path: str | os.PathLike[str],
    *,
    options: ModelOptions | None = None,
    tables: Mapping[int, str] | None = None,
    projection: str = "plugin",
    external: bool | None = None,
) -> None:
    """Writes an ONNX model, whole or not at all; see engine.build for the arguments.

    Args:
        external: weights in PATH.data beside it; None: where the model would pass 2 GB.
    """
    if projection == "fp8":  # before its own arguments are asked for
        raise _no_fp8()
    graph = OnnxGraph()
    add_model(graph, store, engram_layers(store, tables, projection), options or ModelOptions())
    graph.write(Path(path), external)


class OnnxGraph:
    """A Graph whose tensors are names."""

    def __init__(self) -> None:
        self._onnx = _import_onnx()
        self._nodes: list[Any] = []
        self._constants: dict[str, Host] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._renamed: dict[str, str] = {}

    def input(self, name: str, dtype: str, dims: Sequence[int | str]) -> str:
        self._inputs.append(self._value(name, dtype, dims))
        return name

    def output(self, name: str, tensor: str, dtype: str, dims: Sequence[int | str]) -> None:
        """`tensor` gets the output's name, in nodes that are there and in those to come."""
        self._outputs.append(self._value(name, dtype, dims))
        self._renamed[tensor] = name
        for node in self._nodes:
            for names in (node.input, node.output):
                names[:] = [name if found == tensor else found for found in names]

    def add(self, node: Node) -> tuple[str, ...]:
        fields = {"plugin_version": VERSION, "plugin_namespace": NAMESPACE, **node.fields}
        return self._add(node.op, node.inputs, node.outputs, domain=DOMAIN, **fields)

    def reshape(self, x: str, dims: Sequence[int]) -> str:
        return self._add("Reshape", {"data": x, "shape": np.array(dims, np.int64)}, ("reshaped",))[
            0
        ]

    def project_bf16(self, x: str, weight: Host, scale: Host) -> str:
        wide = np.ascontiguousarray(nodes.dequantize(weight, scale).T)
        return self._add("MatMul", {"x": x, "weight": wide}, ("kv",))[0]

    def project_fp8(self, x: str, weight: Host, scale: Host, rows_amax: float) -> str:
        raise _no_fp8()

    def write(self, path: Path, external: bool | None) -> None:
        num_bytes = sum(array.nbytes for array in self._constants.values())
        if external is None:
            external = num_bytes >= _MOST_INLINE_BYTES
        if not external and num_bytes >= _MOST_INLINE_BYTES:
            raise InputError(
                f"external: expected True for {num_bytes} bytes of weights, as a model holds "
                f"less than {_MOST_INLINE_BYTES}, found False"
            )
        with write_aside(path) as scratch:
            if not external:
                tensors = [self._inline(name, array) for name, array in self._constants.items()]
                scratch.write_bytes(self._model(tensors))
                return
            data = path.with_name(f"{path.name}.data")
            with write_aside(data) as data_scratch:  # both are whole before either has its name
                tensors = self._write_data(data_scratch, data.name)
                scratch.write_bytes(self._model(tensors))

    def _model(self, tensors: list[Any]) -> bytes:
        """The serialized model with these initializers."""
        helper = self._onnx.helper
        graph = helper.make_graph(
            self._nodes, "engram", self._inputs, self._outputs, initializer=tensors
        )
        model = helper.make_model(
            graph,
            producer_name=_PRODUCER,
            ir_version=_IR_VERSION,
            opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(DOMAIN, 1)],
        )
        serialized: bytes = model.SerializeToString()
        return serialized

    def _add(
        self,
        op: str,
        inputs: Mapping[str, str | Host],
        outputs: tuple[str, ...],
        domain: str = "",
        **attributes: int | float | str,
    ) -> tuple[str, ...]:
        name = f"{op}_{len(self._nodes)}"
        made = tuple(f"{name}.{output}" for output in outputs)
        sources = []
        for key, value in inputs.items():
            if isinstance(value, np.ndarray):
                self._constants[f"{name}.{key}"] = value
                value = f"{name}.{key}"
            sources.append(self._renamed.get(value, value))
        node = self._onnx.helper.make_node(
            op, sources, made, name=name, domain=domain, **attributes
        )
        self._nodes.append(node)
        return made

    def _value(self, name: str, dtype: str, dims: Sequence[int | str]) -> Any:
        kind = getattr(self._onnx.TensorProto, ONNX[dtype])
        return self._onnx.helper.make_tensor_value_info(name, kind, list(dims))

    def _inline(self, name: str, array: Host) -> Any:
        kind = getattr(self._onnx.TensorProto, ONNX[array.dtype.name])
        return self._onnx.TensorProto(
            name=name, data_type=kind, dims=array.shape, raw_data=array.tobytes()
        )

    def _write_data(self, scratch: Path, location: str) -> list[Any]:
        """Tensors that refer to `location`, with their bytes in `scratch`; small ones inline."""
        tensors, end = [], 0
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            for name, array in self._constants.items():
                if array.nbytes < _EXTERNAL_FROM_BYTES:
                    tensors.append(self._inline(name, array))
                    continue
                end = -(-end // _ALIGNMENT) * _ALIGNMENT
                write_at(handle, np.ascontiguousarray(array).tobytes(), end)
                tensors.append(self._external(name, array, location, end))
                end += array.nbytes
        finally:
            os.close(handle)
        return tensors

    def _external(self, name: str, array: Host, location: str, offset: int) -> Any:
        proto = self._onnx.TensorProto
        tensor = proto(name=name, dims=array.shape, data_location=proto.EXTERNAL)
        tensor.data_type = getattr(proto, ONNX[array.dtype.name])
        place = {"location": location, "offset": offset, "length": array.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        return tensor


def _no_fp8() -> InputError:
    return InputError("projection: expected plugin or tensorrt in ONNX, found fp8")


def _import_onnx() -> Any:
    try:
        return importlib.import_module("onnx")
    except ImportError:
        raise EngramError("ONNX: expected the package onnx, found none: pip install onnx") from None
