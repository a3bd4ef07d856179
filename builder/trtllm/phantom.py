# SPDX-License-Identifier: Apache-2.0
"""History kv_phantom: the KV cache of TensorRT-LLM's executor has one attention layer more than the
decoder, the first, of one head. Nothing attends to it; the hash node keeps token ids in its keys
(engram/history.h), and whatever the executor does to blocks it does to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trtllm_engram.builder.network import ITensor
from trtllm_engram.builder.nodes import PAGED_INPUTS
from trtllm_engram.builder.trtllm import front_end
from trtllm_engram.plugins.errors import InputError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}


def slot_bytes(config: Any) -> int:
    """Of a token's key in a layer of one head."""
    if config.kv_dtype not in _ITEM_BYTES:
        raise InputError(
            f"kv_phantom: kv_dtype: expected one of {', '.join(_ITEM_BYTES)}, found "
            f"{config.kv_dtype}: its keys share bytes, and have scales elsewhere"
        )
    return int(config.head_size) * _ITEM_BYTES[config.kv_dtype]


def check_config(config: Any) -> None:
    if config.mapping.pp_size > 1:
        raise InputError(
            f"kv_phantom: mapping.pp_size: expected 1, found {config.mapping.pp_size}: one layer "
            "more would move the others between the stages"
        )
    slot_bytes(config)


def check_settings(settings: Mapping[str, Any], config: Any) -> None:
    """Settings of trtllm-build under which slots are not as history.h has them."""
    needed = {
        "gpt_attention_plugin": front_end.plugin_setting("gpt_attention_plugin"),
        "remove_input_padding": front_end.plugin_setting("remove_input_padding"),
        "paged_kv_cache": front_end.plugin_setting("paged_kv_cache"),
        "use_cache": settings.get("use_cache"),
    }
    for name, value in needed.items():
        if not value:
            raise InputError(
                f"kv_phantom: {name}: expected to be on, found {value}: the history lies in the "
                "paged KV cache; history explicit needs none"
            )
    if front_end.plugin_setting("streamingllm"):
        raise InputError(
            "kv_phantom: --streamingllm: expected disable, found enable: it drops blocks of the "
            "reserved layer, which needs all"
        )
    linear = settings.get("speculative_decoding_draft_tokens_external")
    if settings.get("max_draft_len") and not linear:
        raise InputError(
            "kv_phantom: --speculative_decoding_mode: expected none or draft_tokens_external, "
            "found one whose drafts are trees: tokens side by side have no one history"
        )

    longest = settings.get("max_seq_len") or getattr(config, "max_position_embeddings", None)
    for name, window in _windows(config):
        if longest is None or window < longest:
            raise InputError(
                f"kv_phantom: {name}: expected no attention window below max_seq_len, {longest}, "
                f"found {window}: a cache of that length writes over the ids of earlier tokens; "
                "build with a --max_seq_len that it holds, or with history explicit"
            )


def _windows(config: Any) -> Iterator[tuple[str, int]]:
    """Lengths of attention that a checkpoint's config.json wishes for, by the names of several
    families and of the executor's own defaults."""
    defaults = getattr(config, "runtime_defaults", None) or {}
    if not isinstance(defaults, Mapping):
        defaults = {"max_attention_window": getattr(defaults, "max_attention_window", None)}
    found = {
        "runtime_defaults.max_attention_window": defaults.get("max_attention_window"),
        "sliding_window": getattr(config, "sliding_window", None),
        "attention_window_sizes": getattr(config, "attention_window_sizes", None),
    }
    for name, windows in found.items():
        for window in windows if isinstance(windows, (list, tuple)) else [windows]:
            if isinstance(window, int) and window > 0:
                yield name, window


def with_layer(
    prepare_inputs: Callable[..., Any], settings: Mapping[str, Any], config: Any
) -> dict[str, Any]:
    """prepare_inputs' arguments for the cache's number of layers."""
    if "num_hidden_layers" not in inspect.signature(prepare_inputs).parameters:
        raise InputError(
            "kv_phantom: prepare_inputs: expected to take num_hidden_layers, found that it does "
            "not: this version of TensorRT-LLM has a cache of the decoder's own layers alone"
        )
    return {**settings, "num_hidden_layers": config.num_hidden_layers + 1}


def shift_layers(layers: Sequence[Any]) -> None:
    """The decoder's attention layers come after the reserved one in the cache."""
    for layer in layers:
        layer.attention.local_layer_idx += 1


def cache_tensors(inputs: Mapping[str, Any]) -> dict[str, ITensor]:
    """What the hash node takes, of a model's inputs."""
    holders = (inputs["kv_cache_params"], inputs["attention_params"])
    found = {}
    for name in PAGED_INPUTS:
        tensor = next(getattr(one, name) for one in holders if hasattr(one, name))
        found[name] = (tensor[0] if isinstance(tensor, list) else tensor).trt_tensor
    mapping = found["host_kv_cache_pool_mapping"]
    if len(mapping.shape) != 2:
        raise InputError(
            "kv_phantom: host_kv_cache_pool_mapping: expected [layers, 2], found "
            f"{list(mapping.shape)}: this version of TensorRT-LLM tells pools apart otherwise"
        )
    return found


def cache_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json for the executor, which makes the cache that it describes."""
    heads = [config["num_key_value_heads"]] * config["num_hidden_layers"]
    return {
        **config,
        "num_hidden_layers": len(heads) + 1,
        "num_kv_heads_per_layer": [1, *heads],
    }
