# SPDX-License-Identifier: Apache-2.0
"""A whole layer of V4.1-Flash, lookup to gate, with its table in GPU memory: op by op, and as a
TensorRT engine where TensorRT is there, against vLLM's lookup and gate around cuBLAS BF16.

The table is filled by the formula of `synthesize`; ids are uniform and random. All sizes begin with
the same tokens, whose outputs are held against numpy, with FP64 in the gate.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_engram.builder import EngramLayout, network
from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.engine import EngineBuilder
from trtllm_engram.builder.formula import row_bytes
from trtllm_engram.builder.made_up import config_of_size
from trtllm_engram.builder.manifest import read_manifest
from trtllm_engram.builder.nodes import dequantize
from trtllm_engram.builder.weight_layout import lay_fastest
from trtllm_engram.plugins.registration import TENSORRT_MODULES

from .. import _native, demo_check, ops
from ..compare.report import HIDDEN_LIMIT_BF16_ULPS
from ..engine import Engine
from ..row import num_blocks, packed_row_bytes
from ..store import LayerWeights
from ..tables import Tables
from .gpu import OURS, Case, Target, expect, load_torch
from .lookup import COLUMNS, HEAD_DIM
from .lookup_host import tensor_at
from .made_up_rows import uniform_ids
from .rivals import Rivals
from .tables import made_up_store

RIVAL = "vLLM + cuBLAS BF16"
EAGER = "op by op"
ROW, ENGINE_ROW = "layer", "layer in an engine"
CHECKED_TOKENS = 8

_TABLE = "bench"
_LAYER, _SEED = 1, 0
_HC_MULT, _HIDDEN = 4, 5120
_OUT, _IN = (_HC_MULT + 1) * _HIDDEN, COLUMNS * HEAD_DIM
_EPS = 1e-6
_WEIGHT_SCALES = 122, 124  # outputs of the projection are then about 1
_ENGINE_RATIO = 1.05  # of the same ops without TensorRT
_CLOSE = 2.0**-5  # between contenders, whose keys round apart: relative, and absolute


@dataclass(frozen=True)
class Model:
    """The layer on the GPU."""

    table: tuple[Any, Any]  # values and scales
    weight: Any  # FP8, in `layout`
    layout: str
    scale: Any
    wide_weight: Any  # BF16 [out, in]: what cuBLAS takes
    gate: tuple[Any, Any]  # q_weight and k_weight


def cases(tokens: Sequence[int], table_gb: float, rivals: Rivals | None) -> Iterator[Case]:
    torch = load_torch()
    torch.manual_seed(0)
    num_bytes = int(table_gb * 1e9)
    config = config_of_size(num_bytes, layers=(_LAYER,))
    most = max(tokens)
    ids = uniform_ids(EngramLayout(config), most, np.random.default_rng(most))
    hidden = torch.randn(max(tokens), _HC_MULT, _HIDDEN, device="cuda").bfloat16()
    weights = random_weights(np.random.default_rng(0), _HC_MULT, _HIDDEN, _IN)
    with made_up_store(num_bytes) as store, Tables() as tables:
        tables.bind(_TABLE, store, layer=_LAYER, placement="device", formula_seed=_SEED)
        model = _on_gpu(weights)
        fingerprint = read_manifest(store).fingerprint
        engine = build_engine(weights, fingerprint, max(tokens)) if has_tensorrt() else None
        check = _checker(config, ids[:CHECKED_TOKENS], hidden[:CHECKED_TOKENS], weights)
        on_gpu = torch.from_numpy(ids).cuda()
        for count in tokens:
            yield from _of_size(model, on_gpu[:count], hidden[:count], rivals, engine, check)


def targets(num_tokens: int) -> list[Target]:
    """What is asked of a layer against the rivals' kernels."""
    if num_tokens <= 64:
        return [Target(RIVAL, ratio=0.57)]
    return [Target(RIVAL, ratio=0.93)] if num_tokens == 8192 else []


def random_weights(
    rng: np.random.Generator, hc_mult: int, hidden_size: int, in_features: int
) -> LayerWeights:
    """FP8 without NaN, up to 1.875; gate weights from 0.5 to 2."""
    out_features = (hc_mult + 1) * hidden_size
    weight = rng.integers(0, 256, (out_features, in_features), np.uint8)
    weight &= 0xBF
    blocks = (num_blocks(out_features), num_blocks(in_features))
    scale = rng.integers(*_WEIGHT_SCALES, blocks, np.uint8)
    q_weight, k_weight = rng.uniform(0.5, 2, (2, hc_mult, hidden_size)).astype(ml_dtypes.bfloat16)
    return LayerWeights(weight, scale, q_weight, k_weight)


def reference(
    values: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint8],
    hidden: npt.NDArray[Any],
    weights: LayerWeights,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """What demo_check.gate gives for tokens with the rows values [T, C, D], scales [T, C, D/32]."""
    num_tokens, columns, head_dim = values.shape
    places = np.arange(num_tokens * columns, dtype=np.int32).reshape(num_tokens, columns)
    flat = values.reshape(-1, head_dim), scales.reshape(num_tokens * columns, -1)
    rows = demo_check.rows(*flat, places)
    kv = demo_check.projection(rows, weights.wkv_weight, weights.wkv_scale)
    gate = weights.q_weight, weights.k_weight
    return demo_check.gate(hidden, kv.astype(ml_dtypes.bfloat16), *gate, _EPS)


def is_right(
    out: npt.NDArray[Any], expected: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
) -> bool:
    """Whether BF16 residual streams are within the bound that engines are held to."""
    return demo_check.max_ulps(out, *expected) <= HIDDEN_LIMIT_BF16_ULPS


def has_tensorrt() -> bool:
    return any(importlib.util.find_spec(name) for name in TENSORRT_MODULES)


def build_engine(weights: LayerWeights, fingerprint: str, max_tokens: int) -> Engine:
    """The layer alone, from ids [T, 1, C] and hidden to out, for the table _TABLE."""
    builder = EngineBuilder()
    net = builder.network
    ids = network.add_input(net, "ids", "int32", ("T", 1, COLUMNS))
    hidden = network.add_input(net, "hidden", "bfloat16", ("T", _HC_MULT, _HIDDEN))
    names: dict[str, Any] = {"table": _TABLE, "fingerprint": fingerprint, "layer": _LAYER}
    names |= {"layer_idx": 0, "head_dim": HEAD_DIM}
    sizes: dict[str, Any] = {"eps": _EPS, "capability": builder.capability}
    out = network.engram_layer(net, ids, hidden, weights, **names, **sizes)
    network.mark_output(net, "out", out)

    def shapes(count: int) -> dict[str, tuple[int, ...]]:
        return {"ids": (count, 1, COLUMNS), "hidden": (count, _HC_MULT, _HIDDEN)}

    builder.add_profile(shapes(1), shapes(max_tokens), shapes(max_tokens))
    return Engine(memoryview(builder.serialize()))


Check = Callable[[str, int, str, Any, Any], None]


def _checker(
    config: EngramConfig, ids: npt.NDArray[np.int32], hidden: Any, weights: LayerWeights
) -> Check:
    """Of a contender's streams: the first tokens against numpy, all against ours."""
    torch = load_torch()
    values, scales = row_bytes(config, _LAYER, ids, _SEED)
    expected, magnitude = reference(values, scales, _bf16(hidden), weights)

    def check(row: str, num_tokens: int, name: str, out: Any, ours: Any) -> None:
        few = min(num_tokens, CHECKED_TOKENS)
        right = is_right(_bf16(out[:few]), (expected[:few], magnitude[:few]))
        close = torch.allclose(out.float(), ours.float(), rtol=_CLOSE, atol=_CLOSE)
        expect(right and close, row, num_tokens, name)

    return check


def _of_size(
    model: Model, ids: Any, hidden: Any, rivals: Rivals | None, engine: Engine | None, check: Check
) -> Iterator[Case]:
    torch = load_torch()
    num_tokens = ids.shape[0]
    outs = [torch.empty_like(hidden) for _ in range(3)]
    eager = _eager(model, ids, hidden, outs[0])
    contenders = {OURS: eager}
    if rivals:
        contenders[RIVAL] = _rival(model, ids, hidden, rivals, outs[1])
    tensors = (ids, model.weight, model.scale, *model.gate, hidden, outs[0])
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    num_bytes += ids.numel() * packed_row_bytes(HEAD_DIM)

    def check_eager(name: str, out: Any) -> None:
        check(ROW, num_tokens, name, out, outs[0])

    yield Case(
        ROW,
        num_tokens,
        num_bytes,
        contenders,
        check_eager,
        targets(num_tokens),
        num_products=num_tokens * _IN * _OUT,
    )
    if engine is None:
        return
    execution = engine.execution()
    inputs = {"ids": ids.view(num_tokens, 1, COLUMNS), "hidden": hidden}

    def check_engine(name: str, out: Any) -> None:
        check(ENGINE_ROW, num_tokens, name, out, outs[2])

    both = {OURS: lambda: execution.run(inputs, {"out": outs[2]})["out"], EAGER: eager}
    target = Target(EAGER, ratio=_ENGINE_RATIO)
    yield Case(ENGINE_ROW, num_tokens, num_bytes, both, check_engine, [target])


def _eager(model: Model, ids: Any, hidden: Any, out: Any) -> Callable[[], Any]:
    rows, kv = _between(ids.shape[0])

    def run() -> Any:
        ops.lookup(*model.table, ids, out=rows)
        ops.project(rows, model.weight, model.scale, weight_layout=model.layout, out=kv)
        return ops.gate(hidden, kv, *model.gate, _EPS, out=out)

    return run


def _rival(model: Model, ids: Any, hidden: Any, rivals: Rivals, out: Any) -> Callable[[], Any]:
    torch = load_torch()
    rows, kv = _between(ids.shape[0])
    look_up = rivals.vllm_lookup(*model.table, ids, rows)
    gate = rivals.vllm_gate(hidden, kv, *model.gate, _EPS, out)

    def run() -> Any:
        look_up()
        torch.mm(rows, model.wide_weight.T, out=kv)
        return gate()

    return run


def _between(num_tokens: int) -> list[Any]:
    """Rows, and keys and value: what one op hands to the next."""
    torch = load_torch()
    widths = (_IN, _OUT)
    return [torch.empty(num_tokens, n, device="cuda", dtype=torch.bfloat16) for n in widths]


def _on_gpu(weights: LayerWeights) -> Model:
    torch = load_torch()
    view = _native.table_view(_TABLE, torch.cuda.current_device())
    shapes = ((view.num_rows, HEAD_DIM), (view.num_rows, num_blocks(HEAD_DIM)))
    values, scales = map(tensor_at, (view.values, view.scales), shapes)
    laid, layout = lay_fastest(weights.wkv_weight, torch.cuda.get_device_capability())
    wide = dequantize(weights.wkv_weight, weights.wkv_scale)
    return Model(
        table=(values, scales),
        weight=torch.from_numpy(laid).cuda(),
        layout=layout,
        scale=torch.from_numpy(weights.wkv_scale).cuda(),
        wide_weight=torch_bf16(wide),
        gate=(torch_bf16(weights.q_weight), torch_bf16(weights.k_weight)),
    )


def torch_bf16(array: npt.NDArray[Any]) -> Any:
    torch = load_torch()
    return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)


def _bf16(tensor: Any) -> npt.NDArray[Any]:
    bits: npt.NDArray[np.int16] = tensor.contiguous().view(load_torch().int16).cpu().numpy()
    return bits.view(ml_dtypes.bfloat16)
