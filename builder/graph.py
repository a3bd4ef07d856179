# SPDX-License-Identifier: Apache-2.0
"""What a model is written on: a TensorRT network or an ONNX graph (onnx.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trtllm_engram.builder import network
from trtllm_engram.builder.network import ITensor, Network
from trtllm_engram.builder.nodes import Host, Node, Tensor


class Graph(Protocol):
    """Tensors are the graph's own; dimensions given by name are dynamic."""

    def input(self, name: str, dtype: str, dims: Sequence[int | str]) -> Tensor: ...
    def output(self, name: str, tensor: Tensor, dtype: str, dims: Sequence[int | str]) -> None: ...
    def add(self, node: Node) -> tuple[Tensor, ...]: ...
    def reshape(self, x: Tensor, dims: Sequence[int]) -> Tensor: ...
    def project_bf16(self, x: Tensor, weight: Host, scale: Host) -> Tensor: ...
    def project_fp8(self, x: Tensor, weight: Host, scale: Host, rows_amax: float) -> Tensor: ...


class NetworkGraph:
    """A Graph whose tensors are ITensors of one INetworkDefinition."""

    def __init__(self, definition: Network) -> None:
        self.network = definition

    def input(self, name: str, dtype: str, dims: Sequence[int | str]) -> ITensor:
        return network.add_input(self.network, name, dtype, dims)

    def output(self, name: str, tensor: ITensor, _dtype: str, _dims: Sequence[int | str]) -> None:
        network.mark_output(self.network, name, tensor)

    def add(self, node: Node) -> tuple[ITensor, ...]:
        return network.add(self.network, node)

    def reshape(self, x: ITensor, dims: Sequence[int]) -> ITensor:
        return network.reshape(self.network, x, dims)

    def project_bf16(self, x: ITensor, weight: Host, scale: Host) -> ITensor:
        return network.project_bf16(self.network, x, weight, scale)

    def project_fp8(self, x: ITensor, weight: Host, scale: Host, rows_amax: float) -> ITensor:
        return network.project_fp8(self.network, x, weight, scale, rows_amax)
