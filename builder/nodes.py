# SPDX-License-Identifier: Apache-2.0
"""The plugins as nodes: inputs in their order, and fields. network.py and onnx.py put them in.

A tensor is whatever the graph works on: an ITensor in a TensorRT network, a name in an ONNX graph.
A numpy array in its place becomes a constant. The plugins' contracts stand at the end of each
cpp/plugins/<op>_plugin.cpp; letters in shapes are those of runtime/ops.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.config import SCALE_BLOCK
from trtllm_engram.builder.layout import EngramLayout
from trtllm_engram.builder.weight_layout import ROW_MAJOR, lay_fastest, lay_weight
from trtllm_engram.plugins.errors import InputError

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensor = Any
Host = npt.NDArray[Any]

WORD_BYTES = 4  # TensorRT has no type for raw bytes: plugins take them as INT32 words


class Weights(Protocol):
    """A layer's projection and gate, as runtime.store.LayerWeights holds them, or as tensors."""

    @property
    def wkv_weight(self) -> Tensor: ...
    @property
    def wkv_scale(self) -> Tensor: ...
    @property
    def q_weight(self) -> Tensor: ...
    @property
    def k_weight(self) -> Tensor: ...


@dataclass(frozen=True)
class Node:
    """One plugin: its name is the plugin's, all else is in the order that the plugin wants."""

    op: str
    inputs: Mapping[str, Tensor]
    fields: Mapping[str, int | float | str]
    outputs: tuple[str, ...]


def hash_node(
    layout: EngramLayout,
    token_map: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor | None = None,
    lookback_ids: Tensor | None = None,
    lookback_dead: Tensor | None = None,
    dead_mask: Tensor | None = None,
    *,
    next_lookback: bool = False,
) -> Node:
    """INT32 [T, L, C], and with `next_lookback` INT32 [B, N-1]. Without lookback_ids no request has
    a past."""
    if lookback_dead is not None and lookback_ids is None:
        raise InputError("hash_ids: lookback_ids: expected with lookback_dead, found None")
    num_layers, num_columns = layout.offsets.shape
    inputs = {
        "token_ids": token_ids,
        "positions": positions,
        "cu_seqlens": cu_seqlens,
        "token_map": token_map,
        "lookback_ids": lookback_ids,
        "lookback_dead": lookback_dead,
        "dead_mask": dead_mask,
        "multipliers": layout.multipliers,
        "primes": layout.primes.reshape(num_layers, num_columns),
        "offsets": layout.offsets,
    }
    fields = {
        "pad_token_id": layout.config.pad_token_id,
        "history": "whole_prompt" if lookback_ids is None else "explicit",
        "has_cu_seqlens": int(cu_seqlens is not None),
        "has_lookback_dead": int(lookback_dead is not None),
        "has_dead_mask": int(dead_mask is not None),
        "has_next_lookback": int(next_lookback),
    }
    outputs = ("hash_ids", "next_lookback_ids") if next_lookback else ("hash_ids",)
    return Node("EngramHash", _present(inputs), fields, outputs)


# Of TensorRT-LLM's KV cache and batch, by its own names.
PAGED_INPUTS = (
    "host_kv_cache_pool_pointers",
    "host_kv_cache_pool_mapping",
    "kv_cache_block_offsets",
    "sequence_length",
    "context_lengths",
    "cache_indirection",
    "host_request_types",
    "host_context_lengths",
)


def paged_hash_node(
    layout: EngramLayout,
    token_map: Tensor,
    token_ids: Tensor,
    cache: Mapping[str, Tensor],
    *,
    tokens_per_block: int,
    slot_bytes: int,
) -> Node:
    """INT32 [T, L, C] under TensorRT-LLM's executor: the tokens before a call lie in the keys of
    its first attention layer, which has one head and belongs to nobody else. The other outputs are
    what runtime.ops.history gives. `cache` has PAGED_INPUTS."""
    num_layers, num_columns = layout.offsets.shape
    inputs = {
        "token_ids": token_ids,
        "token_map": token_map,
        **{name: cache[name] for name in PAGED_INPUTS},
        "multipliers": layout.multipliers,
        "primes": layout.primes.reshape(num_layers, num_columns),
        "offsets": layout.offsets,
    }
    fields: dict[str, int | float | str] = {
        "pad_token_id": layout.config.pad_token_id,
        "history": "kv_phantom",
        "tokens_per_block": tokens_per_block,
        "slot_bytes": slot_bytes,
    }
    outputs = ("hash_ids", "positions", "cu_seqlens", "lookback_ids")
    return Node("EngramHash", inputs, fields, outputs)


class TableNames(TypedDict):
    """Which table a lookup reads, and by which ids.

    table: the name that the process binds at run time (runtime.tables).
    fingerprint: of the layout: manifest.fingerprint of the store.
    layer: the model's number of the layer whose table it must be.
    layer_idx: of the ids [T, L, C], the layer's: config.layer_ids.index(layer), unless a network
        has cut the ids itself.
    head_dim: values of a row.
    """

    table: str
    fingerprint: str
    layer: int
    layer_idx: int
    head_dim: int


def lookup_node(
    hash_ids: Tensor,
    *,
    output: str = "bf16",
    values: str = "fp8",
    prefetched: Sequence[Tensor] = (),
    **names: Unpack[TableNames],
) -> Node:
    """BF16 [T, C*D]; or with `output` mxfp8_linear or mxfp8_128x4 the values, as FP8 or as INT32
    words, and the scales as INT32 words. `prefetched`: the outputs of a prefetch_node of the same
    ids and fields, which the lookup then waits for."""
    fields: dict[str, Any] = {**names, "output": output, "values": values}
    outputs = ("rows",) if output == "bf16" else ("values", "scales")
    inputs = {"hash_ids": hash_ids}
    if prefetched:
        if len(prefetched) != len(outputs):
            raise InputError(
                f"prefetched: expected {len(outputs)} tensors ({', '.join(outputs)}), "
                f"found {len(prefetched)}"
            )
        inputs |= dict(zip(outputs, prefetched, strict=True))
        fields["prefetched"] = 1
    return Node("EngramLookup", inputs, fields, outputs)


def prefetch_node(
    hash_ids: Tensor, *, output: str = "bf16", values: str = "fp8", **names: Unpack[TableNames]
) -> Node:
    """lookup_node's outputs, gathered on a side stream: for the lookup that takes them as
    `prefetched`, with the same options, and for nothing else."""
    node = lookup_node(hash_ids, output=output, values=values, **names)
    return Node("EngramPrefetch", node.inputs, node.fields, node.outputs)


def project_node(x: Tensor, weight: Tensor, scale: Tensor, weight_layout: str = ROW_MAJOR) -> Node:
    """BF16 [T, out] of x BF16 [T, in], weight FP8 [out, in] and scale E8M0, one per 32x32; or both
    as tensors of the graph that hold their words(), the weight's in weight_layout, as the node
    holds it."""
    if isinstance(weight, np.ndarray):
        _check_weight("project", weight, scale)
        weight, scale = words(lay_weight(weight, weight_layout)), words(scale.reshape(-1))
    return _project_node(x, weight, scale, weight_layout)


def fastest_project_node(
    x: Tensor, weight: Tensor, scale: Tensor, capability: tuple[int, int] | None
) -> Node:
    """project_node with the weight in the layout that is fastest on a GPU of this compute
    capability, or in row_major for None and of tensors of the graph."""
    if not isinstance(weight, np.ndarray):
        return project_node(x, weight, scale)
    _check_weight("project", weight, scale)
    laid, layout = lay_fastest(weight, capability)
    return _project_node(x, words(laid), words(scale.reshape(-1)), layout)


def _project_node(x: Tensor, weight: Tensor, scale: Tensor, weight_layout: str) -> Node:
    inputs = {"x": x, "weight": weight, "scale": scale}
    return Node("EngramProject", inputs, {"weight_layout": weight_layout}, ("kv",))


def gate_node(
    hidden: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    token_mask: Tensor | None = None,
    *,
    in_place: bool = False,
) -> Node:
    """Shape and type of hidden, [T, hc_mult, hidden]; a token masked False stays as it is."""
    inputs = {
        "hidden": hidden,
        "kv": kv,
        "q_weight": q_weight,
        "k_weight": k_weight,
        "token_mask": token_mask,
    }
    fields: dict[str, int | float | str] = {
        "eps": float(eps),
        "has_token_mask": int(token_mask is not None),
        "in_place": int(in_place),
    }
    return Node("EngramGate", _present(inputs), fields, ("out",))


def dequantize(weight: Host, scale: Host) -> Host:
    """FP8 [out, in] times its E8M0 scales as BF16, which is exact where no product leaves BF16's
    normal range."""
    _check_weight("dequantize", weight, scale)
    out_features, in_features = weight.shape
    values = weight.view(ml_dtypes.float8_e4m3fn)
    factors = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
    columns = np.repeat(factors, SCALE_BLOCK, axis=1)[:, :in_features]
    result = np.empty((out_features, in_features), ml_dtypes.bfloat16)
    for block, start in enumerate(range(0, out_features, SCALE_BLOCK)):
        rows = slice(start, start + SCALE_BLOCK)
        result[rows] = values[rows].astype(np.float32) * columns[block]
    return result


def _present(inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in inputs.items() if tensor is not None}


def words(data: Host) -> npt.NDArray[np.int32]:
    """Bytes [..., n] as words [..., ceil(n/4)], in memory order."""
    missing = -data.shape[-1] % WORD_BYTES
    if missing:
        data = np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, missing)])
    return np.ascontiguousarray(data).view(np.int32)


def _check_weight(op: str, weight: Host, scale: Host) -> None:
    if weight.ndim != 2 or weight.dtype.itemsize != 1 or weight.shape[1] % SCALE_BLOCK:
        raise InputError(
            f"{op}: weight: expected FP8 bytes [out, in] with in a multiple of {SCALE_BLOCK}, "
            f"found {weight.dtype} {list(weight.shape)}"
        )
    expected = tuple(-(-size // SCALE_BLOCK) for size in weight.shape)
    if scale.shape != expected or scale.dtype.itemsize != 1:
        raise InputError(
            f"{op}: scale: expected E8M0 bytes {list(expected)}, "
            f"found {scale.dtype} {list(scale.shape)}"
        )
