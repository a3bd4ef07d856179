# SPDX-License-Identifier: Apache-2.0
"""An Engram layer that owns its weights and knows its config, for any graph (graph.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from trtllm_engram.builder import nodes
from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.graph import Graph
from trtllm_engram.builder.layout import EngramLayout
from trtllm_engram.builder.nodes import Host, TableNames, Tensor, Weights
from trtllm_engram.plugins.errors import InputError

PROJECTIONS = {
    "plugin": "EngramProject: FP8 weights with a scale per 32x32 block",
    "tensorrt": "TensorRT's own product, of the weights in BF16",
    "fp8": "TensorRT's own product in FP8, a scale per tensor: an approximation",
}
FP8_CAPABILITY = (8, 9)  # of the first GPUs with products in FP8


class StoreManifest(Protocol):
    @property
    def fingerprint(self) -> str: ...


class ModelStore(Protocol):
    """What an engine needs of a store (runtime.open_store)."""

    @property
    def manifest(self) -> StoreManifest: ...
    @property
    def config(self) -> EngramConfig: ...
    @property
    def layout(self) -> EngramLayout: ...
    @property
    def token_map(self) -> Host: ...
    def weights(self, layer_id: int) -> Weights: ...


class LayerTensors(NamedTuple):
    rows: Tensor  # BF16 [T, C*D]
    kv: Tensor  # BF16 [T, (hc_mult+1)*hidden]
    hidden: Tensor  # [T, hc_mult, hidden]


def table_name(layer_id: int, prefix: str = "engram") -> str:
    """The name that engines know a layer's table by, unless they are told another."""
    return f"{prefix}_{layer_id}"


class EngramLayer:
    """One layer of a store.

    Args:
        store: an open store.
        layer_id: the model's number of the layer.
        table: name that the process binds to the layer's table at run time.
        projection: a key of PROJECTIONS.
        rows_amax: for fp8, a bound of the rows' absolute values.
        capability: compute capability of the GPU that will run the layer, whose plugin then has
            its weight in the order that is fastest there; None: one that all GPUs take.
        in_place: let the output overwrite hidden; EngineBuilder.allow_in_place() must be called.
    """

    def __init__(
        self,
        store: ModelStore,
        layer_id: int,
        *,
        table: str | None = None,
        projection: str = "plugin",
        rows_amax: float = 0.0,
        capability: tuple[int, int] | None = None,
        in_place: bool = False,
    ) -> None:
        if projection not in PROJECTIONS:
            raise InputError(
                f"projection: expected one of {', '.join(PROJECTIONS)}, found {projection!r}"
            )
        if projection == "fp8" and not rows_amax > 0:
            raise InputError(f"rows_amax: expected a positive number for fp8, found {rows_amax}")
        if projection == "fp8" and capability is not None and capability < FP8_CAPABILITY:
            expected, found = (".".join(map(str, one)) for one in (FP8_CAPABILITY, capability))
            raise InputError(
                f"projection: expected a GPU of compute capability {expected} or later for fp8, "
                f"found {found}"
            )
        if table is not None and not table:
            raise InputError(f"table: expected a name for layer {layer_id}, found none")
        self.config = store.config
        self.layer_id = layer_id
        self.table = table_name(layer_id) if table is None else table
        self.projection = projection
        self.rows_amax = rows_amax
        self.capability = capability
        self.in_place = in_place
        self.fingerprint = store.manifest.fingerprint
        self.weights = store.weights(layer_id)

    def prefetch(self, graph: Graph, hash_ids: Tensor) -> tuple[Tensor, ...]:
        """Starts the layer's lookup beside the layers that follow; for __call__."""
        return graph.add(nodes.prefetch_node(hash_ids, **self._names()))

    def __call__(
        self,
        graph: Graph,
        hash_ids: Tensor,
        hidden: Tensor,
        token_mask: Tensor | None = None,
        prefetched: Sequence[Tensor] = (),
    ) -> LayerTensors:
        """Adds lookup, projection and gate; hash_ids [T, L, C] of all the store's layers."""
        (rows,) = graph.add(nodes.lookup_node(hash_ids, **self._names(), prefetched=prefetched))
        kv = self._project(graph, rows)
        copies, eps = (self.weights.q_weight, self.weights.k_weight), self.config.rms_norm_eps
        gate = nodes.gate_node(hidden, kv, *copies, eps, token_mask, in_place=self.in_place)
        (out,) = graph.add(gate)
        return LayerTensors(rows, kv, out)

    def mxfp8(self, graph: Graph, hash_ids: Tensor, scale_order: str) -> tuple[Tensor, ...]:
        """The same rows as MXFP8 values and scales in INT32 words, as network.lookup_mxfp8 has
        them, by a lookup of their own."""
        output = f"mxfp8_{scale_order}"
        node = nodes.lookup_node(hash_ids, output=output, values="words", **self._names())
        return graph.add(node)

    def _names(self) -> TableNames:
        return {
            "table": self.table,
            "fingerprint": self.fingerprint,
            "layer": self.layer_id,
            "layer_idx": self.config.layer_ids.index(self.layer_id),
            "head_dim": self.config.head_dim,
        }

    def _project(self, graph: Graph, rows: Tensor) -> Tensor:
        weight, scale = self.weights.wkv_weight, self.weights.wkv_scale
        if self.projection == "tensorrt":
            return graph.project_bf16(rows, weight, scale)
        if self.projection == "fp8":
            return graph.project_fp8(rows, weight, scale, self.rows_amax)
        return graph.add(nodes.fastest_project_node(rows, weight, scale, self.capability))[0]


def engram_layers(
    store: ModelStore,
    tables: Mapping[int, str] | None = None,
    projection: str = "plugin",
    rows_amax: float = 0.0,
    capability: tuple[int, int] | None = None,
) -> list[EngramLayer]:
    """All layers of a store; `tables` names those whose name is not table_name's."""
    names = tables or {}
    for layer_id in names:
        if layer_id not in store.config.layer_ids:
            known = ", ".join(map(str, store.config.layer_ids))
            raise InputError(f"tables: expected layers of {known}, found {layer_id}")
    return [
        EngramLayer(
            store,
            layer_id,
            table=names.get(layer_id),
            projection=projection,
            rows_amax=rows_amax,
            capability=capability,
        )
        for layer_id in store.config.layer_ids
    ]
