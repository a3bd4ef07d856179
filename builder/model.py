# SPDX-License-Identifier: Apache-2.0
"""A store's Engram layers as one model: token ids and residual streams in, streams out.

token_ids               INT32 [T]
positions               INT64 [T]
cu_seqlens              INT32 [B+1]
lookback_ids            INT32 [B, N-1], with history "explicit"
layers.{i}.hidden       [T, hc_mult, hidden], for each layer; with flat_hidden its values as [-1]
layers.{i}.hidden_out   [T, hc_mult, hidden]
next_lookback_ids       INT32 [B, N-1], with history "explicit": the next call's lookback_ids
hash_ids                INT32 [T, L, C], with check_outputs
layers.{i}.rows         BF16 [T, C*D], with check_outputs
layers.{i}.values       INT32 [T, C*D/4], with check_mxfp8: FP8, four to a word
layers.{i}.scales       INT32 [T, C*D/128], with check_mxfp8 linear: E8M0, four to a word
layers.{i}.scales_128x4 INT32 [words], with check_mxfp8 128x4: the same in F8_128x4 order
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trtllm_engram.builder import nodes
from trtllm_engram.builder.config import SCALE_BLOCK, EngramConfig
from trtllm_engram.builder.graph import Graph
from trtllm_engram.builder.layers import EngramLayer, ModelStore
from trtllm_engram.builder.nodes import WORD_BYTES, Tensor
from trtllm_engram.plugins.errors import InputError

TOKENS, BOUNDARIES, REQUESTS, VALUES = "tokens", "boundaries", "requests", "values"
SCALE_WORDS = "scale_words"
HISTORIES = ("explicit", "whole_prompt")
SCALE_ORDERS = ("linear", "128x4")
HIDDEN_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ModelOptions:
    """What a model of a store is like, beside the store.

    history: "explicit": lookback_ids holds the tokens before the call; "whole_prompt": no past.
    check_outputs: give out row ids and rows too, for `compare`.
    check_mxfp8: give out rows as MXFP8 too, with scales in one of SCALE_ORDERS, for `compare`.
    prefetch: look all layers' rows up on a side stream, as soon as there are row ids.
    flat_hidden: residual streams come without their shape, as Triton joins those of a batch.
    """

    hidden_dtype: str = "bfloat16"
    history: str = "explicit"
    check_outputs: bool = False
    prefetch: bool = False
    flat_hidden: bool = False
    check_mxfp8: str | None = None

    def __post_init__(self) -> None:
        choices = {"hidden_dtype": HIDDEN_DTYPES, "history": HISTORIES}
        if self.check_mxfp8 is not None:
            choices["check_mxfp8"] = SCALE_ORDERS
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise InputError(
                    f"{name}: expected one of {', '.join(known)}, found {getattr(self, name)!r}"
                )


def hidden_name(layer_id: int) -> str:
    return f"layers.{layer_id}.hidden"


def hidden_out_name(layer_id: int) -> str:
    return f"layers.{layer_id}.hidden_out"


def rows_name(layer_id: int) -> str:
    return f"layers.{layer_id}.rows"


def packed_names(layer_id: int) -> tuple[str, str, str]:
    """What check_mxfp8, and networks of one's own, call the outputs of lookup_mxfp8: values, scales
    in linear order, scales in 128x4 order."""
    prefix = f"layers.{layer_id}"
    return f"{prefix}.values", f"{prefix}.scales", f"{prefix}.scales_128x4"


def add_model(
    graph: Graph, store: ModelStore, layers: list[EngramLayer], options: ModelOptions
) -> None:
    """Writes the model on an empty graph."""
    config, explicit = store.config, options.history == "explicit"
    window = (REQUESTS, config.max_ngram_size - 1)
    hashed = graph.add(
        nodes.hash_node(
            store.layout,
            store.token_map,
            graph.input("token_ids", "int32", (TOKENS,)),
            graph.input("positions", "int64", (TOKENS,)),
            graph.input("cu_seqlens", "int32", (BOUNDARIES,)),
            graph.input("lookback_ids", "int32", window) if explicit else None,
            next_lookback=explicit,
        )
    )
    if options.check_outputs:
        columns = (TOKENS, config.num_layers, config.num_columns)
        graph.output("hash_ids", hashed[0], "int32", columns)
    residual = (TOKENS, config.hc_mult, config.hidden_size)
    started = {
        layer.layer_id: layer.prefetch(graph, hashed[0]) if options.prefetch else ()
        for layer in layers
    }
    for layer in layers:
        shape = (VALUES,) if options.flat_hidden else residual
        hidden = graph.input(hidden_name(layer.layer_id), options.hidden_dtype, shape)
        if options.flat_hidden:
            hidden = graph.reshape(hidden, (-1, config.hc_mult, config.hidden_size))
        made = layer(graph, hashed[0], hidden, prefetched=started[layer.layer_id])
        if options.check_outputs:
            rows_shape = (TOKENS, config.row_dim)
            graph.output(rows_name(layer.layer_id), made.rows, "bfloat16", rows_shape)
        if options.check_mxfp8 is not None:
            _add_packed(graph, config, layer, hashed[0], options.check_mxfp8)
        out_name = hidden_out_name(layer.layer_id)
        graph.output(out_name, made.hidden, options.hidden_dtype, residual)
    if explicit:
        graph.output("next_lookback_ids", hashed[1], "int32", window)


def _add_packed(
    graph: Graph, config: EngramConfig, layer: EngramLayer, hash_ids: Tensor, scale_order: str
) -> None:
    """In words, which any host can read: few have a type for FP8."""
    num_scales = config.row_dim // SCALE_BLOCK
    if scale_order == "linear" and num_scales % WORD_BYTES:
        raise InputError(
            f"check_mxfp8: expected columns whose scales fill words of {WORD_BYTES} bytes for "
            f"linear, found {num_scales} scales of a token"
        )
    values, scales = layer.mxfp8(graph, hash_ids, scale_order)
    values_name, linear_name, tiled_name = packed_names(layer.layer_id)
    graph.output(values_name, values, "int32", (TOKENS, config.row_dim // WORD_BYTES))
    if scale_order == "linear":
        graph.output(linear_name, scales, "int32", (TOKENS, num_scales // WORD_BYTES))
    else:
        graph.output(tiled_name, scales, "int32", (SCALE_WORDS,))


def input_shapes(
    store: ModelStore, options: ModelOptions, num_tokens: int, num_requests: int
) -> Mapping[str, tuple[int, ...]]:
    """The shape of every input for a call with so many tokens and requests."""
    config = store.config
    residual: tuple[int, ...] = (num_tokens, config.hc_mult, config.hidden_size)
    if options.flat_hidden:
        residual = (math.prod(residual),)
    shapes: dict[str, tuple[int, ...]] = {
        "token_ids": (num_tokens,),
        "positions": (num_tokens,),
        "cu_seqlens": (num_requests + 1,),
    }
    if options.history == "explicit":
        shapes["lookback_ids"] = (num_requests, config.max_ngram_size - 1)
    return shapes | {hidden_name(layer_id): residual for layer_id in config.layer_ids}
