# SPDX-License-Identifier: Apache-2.0
"""Engram on TensorRT tensors: one function per plugin, for any INetworkDefinition.

    ids, _ = network.hash_ids(net, layout, token_map, token_ids, positions, cu_seqlens)
    rows = network.lookup(
        net, ids, table="engram_1", fingerprint=..., layer=1, layer_idx=0, head_dim=256
    )
    kv = network.project(net, rows, weight, scale)
    out = network.gate(net, hidden, kv, q_weight, k_weight, eps)

The network must be strongly typed. Plugins are registered where TensorRT does not know them yet.
Weights are numpy arrays; the network keeps them alive until it is dropped. Letters in shapes: as in
runtime/ops.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from trtllm_engram.builder import nodes
from trtllm_engram.builder.dtypes import TENSORRT
from trtllm_engram.builder.layout import EngramLayout
from trtllm_engram.builder.nodes import Host, Node, TableNames
from trtllm_engram.builder.tensorrt_log import told
from trtllm_engram.builder.weight_layout import ROW_MAJOR
from trtllm_engram.plugins.registration import import_tensorrt, plugin_or_none, require_registered

if TYPE_CHECKING:
    from typing_extensions import Unpack

Network = Any  # tensorrt.INetworkDefinition
ITensor = Any

_FP8_MAX = 448.0
# What TensorRT reads when it builds.
_constants_by_address: weakref.WeakKeyDictionary[Network, dict[int, Host]] = (
    weakref.WeakKeyDictionary()
)


class HashIds(NamedTuple):
    ids: ITensor  # INT32 [T, L, C]
    next_lookback_ids: ITensor | None  # INT32 [B, N-1]


def hash_ids(
    network: Network,
    layout: EngramLayout,
    token_map: Host | ITensor,
    token_ids: ITensor,
    positions: ITensor,
    cu_seqlens: ITensor | None = None,
    lookback_ids: ITensor | None = None,
    lookback_dead: ITensor | None = None,
    dead_mask: ITensor | None = None,
    *,
    next_lookback: bool = False,
    name: str = "",
) -> HashIds:
    """Row ids of every token in every layer's table; see runtime.ops.hash_ids for the inputs.
    `name`: of the layer in the network, as for all functions here that take one."""
    node = nodes.hash_node(
        layout,
        token_map,
        token_ids,
        positions,
        cu_seqlens,
        lookback_ids,
        lookback_dead,
        dead_mask,
        next_lookback=next_lookback,
    )
    outputs = add(network, node, name)
    return HashIds(outputs[0], outputs[1] if next_lookback else None)


def paged_hash_ids(
    network: Network,
    layout: EngramLayout,
    token_map: Host | ITensor,
    token_ids: ITensor,
    cache: Mapping[str, ITensor],
    *,
    tokens_per_block: int,
    slot_bytes: int,
    name: str = "",
) -> ITensor:
    """Row ids INT32 [T, L, C] under TensorRT-LLM's executor; see nodes.paged_hash_node."""
    node = nodes.paged_hash_node(
        layout,
        token_map,
        token_ids,
        cache,
        tokens_per_block=tokens_per_block,
        slot_bytes=slot_bytes,
    )
    return add(network, node, name)[0]


def rank_ids(network: Network, ids: ITensor, hidden: ITensor, rank: int) -> ITensor:
    """A sequence-parallel rank's part of hash_ids' result: as many tokens as its hidden [T', ...]
    has, from token rank * T' on. Tokens past the end read no row."""
    trt = import_tensorrt()
    num_layers, num_columns = ids.shape[1], ids.shape[2]
    local = network.add_shape(hidden).get_output(0)  # INT64 [3]
    count = network.add_slice(local, (0,), (1,), (1,)).get_output(0)
    start = _product(network, count, constant(network, np.array([rank], np.int64)))
    zeros = constant(network, np.zeros(2, np.int64))
    sizes = constant(network, np.array([num_layers, num_columns], np.int64))
    layer = network.add_slice(ids, (0, 0, 0), (0, 0, 0), (1, 1, 1))
    layer.mode = trt.SampleMode.FILL
    layer.set_input(1, _concatenate(network, start, zeros))
    layer.set_input(2, _concatenate(network, count, sizes))
    layer.set_input(4, constant(network, np.array(-1, np.int32)))
    return layer.get_output(0)


def lookup(
    network: Network,
    ids: ITensor,
    *,
    prefetched: Sequence[ITensor] = (),
    name: str = "",
    **names: Unpack[TableNames],
) -> ITensor:
    """BF16 [T, C*D]: rows of a named table, for layer `layer_idx` of ids [T, L, C].

    `names` say which table, as nodes.TableNames has them. `prefetched`: what prefetch() of the same
    ids and names has started, to be waited for.
    """
    return add(network, nodes.lookup_node(ids, prefetched=prefetched, **names), name)[0]


def lookup_mxfp8(
    network: Network,
    ids: ITensor,
    *,
    scale_order: str = "linear",
    values: str = "fp8",
    prefetched: Sequence[ITensor] = (),
    **names: Unpack[TableNames],
) -> tuple[ITensor, ITensor]:
    """Rows as values and scales: values FP8 [T, C*D] or, with `values` words, INT32 [T, C*D/4];
    scales as INT32 words, [T, C*D/128] in linear order, flat in 128x4 order."""
    output = f"mxfp8_{scale_order}"
    node = nodes.lookup_node(ids, output=output, values=values, prefetched=prefetched, **names)
    outputs = add(network, node)
    return outputs[0], outputs[1]


def prefetch(
    network: Network,
    ids: ITensor,
    *,
    output: str = "bf16",
    values: str = "fp8",
    **names: Unpack[TableNames],
) -> tuple[ITensor, ...]:
    """Starts a lookup on a side stream, beside the layers that follow; the result is only for
    lookup() or lookup_mxfp8() of the same ids and names, as `prefetched`.

        started = network.prefetch(net, ids, **names)      # as soon as there are ids
        ...                                                # layers that need no rows
        rows = network.lookup(net, ids, **names, prefetched=started)

    One at a time in a table and execution context: the next of the same table begins after the
    lookup that waits for this one.

    output: bf16, or mxfp8_linear or mxfp8_128x4 for lookup_mxfp8 with that scale_order.
    """
    return add(network, nodes.prefetch_node(ids, output=output, values=values, **names))


def project(
    network: Network,
    x: ITensor,
    weight: Host | ITensor,
    scale: Host | ITensor,
    weight_layout: str = ROW_MAJOR,
    *,
    name: str = "",
) -> ITensor:
    """BF16 [T, out]: x W^T by the plugin; weight FP8 [out, in], scale E8M0, one per 32x32, or both
    as INT32 tensors of their bytes (nodes.words), the weight's in weight_layout. In that the plan
    holds the weight; engram_layer takes what is fastest on a GPU."""
    return add(network, nodes.project_node(x, weight, scale, weight_layout), name)[0]


def reshape(network: Network, x: ITensor, dims: Sequence[int]) -> ITensor:
    """The same values in another shape, one of whose sizes may be -1: what is left."""
    layer = network.add_shuffle(x)
    layer.reshape_dims = tuple(dims)
    return layer.get_output(0)


def project_bf16(network: Network, x: ITensor, weight: Host, scale: Host) -> ITensor:
    """The same by TensorRT's own matrix product, from the weight in BF16 (twice the bytes)."""
    return matmul(network, x, constant(network, nodes.dequantize(weight, scale)))


def project_fp8(
    network: Network, x: ITensor, weight: Host, scale: Host, rows_amax: float
) -> ITensor:
    """The same by TensorRT's FP8 product, from Q/DQ with one scale per tensor: it rounds weights
    and rows again, so it is an approximation. rows_amax bounds the rows' absolute values."""
    trt = import_tensorrt()
    wide = nodes.dequantize(weight, scale)
    weight_scale = float(np.abs(wide.astype(np.float32)).max()) / _FP8_MAX or 1.0

    def bf16_scale(value: float) -> ITensor:
        return constant(network, np.array(value, np.float32).astype(ml_dtypes.bfloat16))

    factor = np.array(weight_scale, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    narrow = (wide.astype(np.float32) / factor).astype(ml_dtypes.float8_e4m3fn)
    x_scale = bf16_scale(rows_amax / _FP8_MAX)
    x_fp8 = network.add_quantize(x, x_scale, trt.DataType.FP8).get_output(0)
    x_again = network.add_dequantize(x_fp8, x_scale, trt.DataType.BF16).get_output(0)
    w_again = network.add_dequantize(
        constant(network, narrow), bf16_scale(weight_scale), trt.DataType.BF16
    ).get_output(0)
    return matmul(network, x_again, w_again)


def matmul(network: Network, x: ITensor, weight: ITensor) -> ITensor:
    """x [T, in] times weight [out, in], transposed."""
    operation = import_tensorrt().MatrixOperation
    return network.add_matrix_multiply(x, operation.NONE, weight, operation.TRANSPOSE).get_output(0)


def gate(
    network: Network,
    hidden: ITensor,
    kv: ITensor,
    q_weight: Host | ITensor,
    k_weight: Host | ITensor,
    eps: float,
    token_mask: ITensor | None = None,
    *,
    in_place: bool = False,
    name: str = "",
) -> ITensor:
    """The residual stream [T, hc_mult, hidden] with the gated value added, of hidden's type.

    in_place lets the output overwrite hidden; the builder's preview feature
    ALIASED_PLUGIN_IO_10_03 must then be on.
    """
    node = nodes.gate_node(hidden, kv, q_weight, k_weight, eps, token_mask, in_place=in_place)
    return add(network, node, name)[0]


def engram_layer(
    network: Network,
    ids: ITensor,
    hidden: ITensor,
    weights: nodes.Weights,
    *,
    eps: float,
    token_mask: ITensor | None = None,
    prefetched: Sequence[ITensor] = (),
    capability: tuple[int, int] | None = None,
    in_place: bool = False,
    name: str = "",
    **names: Unpack[TableNames],
) -> ITensor:
    """A whole layer: lookup, projection and gate; hidden in, hidden out. `names` are lookup's,
    capability and in_place as in layers.EngramLayer; `name` begins the names of its three layers.
    """

    def part(op: str) -> str:
        return name and f"{name}/{op}"

    rows = lookup(network, ids, **names, prefetched=prefetched, name=part("lookup"))
    weight, scale = weights.wkv_weight, weights.wkv_scale
    projection = nodes.fastest_project_node(rows, weight, scale, capability)
    (kv,) = add(network, projection, part("project"))
    copies = weights.q_weight, weights.k_weight
    return gate(network, hidden, kv, *copies, eps, token_mask, in_place=in_place, name=part("gate"))


def add(network: Network, node: Node, name: str = "") -> tuple[ITensor, ...]:
    """Puts a plugin into the network; numpy arrays among its inputs become constants."""
    trt = import_tensorrt()
    require_registered(trt)
    tensors = [
        constant(network, value) if isinstance(value, np.ndarray) else value
        for value in node.inputs.values()
    ]
    with told(node.op) as failure:
        plugin = failure.check(plugin_or_none(node.op, trt, node.fields))
        layer = failure.check(network.add_plugin_v3(tensors, [], plugin))
    if name:
        layer.name = name
    return tuple(layer.get_output(index) for index in range(layer.num_outputs))


def constant(network: Network, array: Host) -> ITensor:
    """A constant of the array's own type."""
    trt = import_tensorrt()
    array = _keep(network, np.require(array, requirements=["C_CONTIGUOUS", "ALIGNED"]))
    dtype = getattr(trt.DataType, TENSORRT[array.dtype.name])
    # By address: numpy's own BF16 and FP8 are unknown to the bindings.
    weights = trt.Weights(dtype, array.ctypes.data, array.size)
    return network.add_constant(array.shape, weights).get_output(0)


def add_input(network: Network, name: str, dtype: str, dims: Sequence[int | str]) -> ITensor:
    """A network input; a dimension given by name is dynamic, equal names are equal sizes."""
    trt = import_tensorrt()
    shape = [-1 if isinstance(size, str) else size for size in dims]
    tensor = network.add_input(name, getattr(trt.DataType, TENSORRT[dtype]), shape)
    for index, size in enumerate(dims):
        if isinstance(size, str):
            tensor.set_dimension_name(index, size)
    return tensor


def mark_output(network: Network, name: str, tensor: ITensor) -> None:
    tensor.name = name
    network.mark_output(tensor)


def _keep(network: Network, array: Host) -> Host:
    """The array, kept as long as the network is."""
    kept = _constants_by_address.setdefault(network, {})
    first = kept.setdefault(array.ctypes.data, array)
    if (first.dtype, first.size) == (array.dtype, array.size):
        return array
    # TensorRT 10.6 takes what lies at one address for one constant, of the first one's size: a
    # part and the whole would be garbage.
    copy = array.copy()
    return kept.setdefault(copy.ctypes.data, copy)


def _product(network: Network, a: ITensor, b: ITensor) -> ITensor:
    operation = import_tensorrt().ElementWiseOperation.PROD
    return network.add_elementwise(a, b, operation).get_output(0)


def _concatenate(network: Network, a: ITensor, b: ITensor) -> ITensor:
    return network.add_concatenation([a, b]).get_output(0)
