# SPDX-License-Identifier: Apache-2.0
"""The fakes of fake_trtllm as modules of one version, and trtllm-build's steps over them."""

from __future__ import annotations

import copy
import enum
import importlib
import json
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_tensorrt
import fake_trtllm
import pytest
from fake_trtllm import DecoderModelForCausalLM, PretrainedConfig, State, Transformer

VERSIONS = ("0.14", "0.15", "1.2", "1.3")
_OLD = VERSIONS[:2]
# Ours that import it.
PACKAGE = "trtllm_engram.builder.trtllm"
OURS = ("front_end", "memory", "model", "llama")


def _prepare_inputs_0_14(
    self, max_num_tokens, use_cache, max_draft_len=0, prompt_embedding_table_size=0,
    gather_generation_logits=False, speculative_decoding_draft_tokens_external=False,
) -> Any:  # fmt: skip
    return self._inputs(max_num_tokens, use_cache, None)


def _prepare_inputs_0_15(
    self, max_num_tokens, use_cache, max_draft_len=0, prompt_embedding_table_size=0,
    gather_generation_logits=False, num_hidden_layers=None,
    speculative_decoding_draft_tokens_external=False,
) -> Any:  # fmt: skip
    return self._inputs(max_num_tokens, use_cache, num_hidden_layers)


def _prepare_inputs_1_2(
    self, max_num_tokens, use_cache, max_draft_len=0, prompt_embedding_table_size=0,
    num_hidden_layers=None, speculative_decoding_draft_tokens_external=False,
) -> Any:  # fmt: skip
    return self._inputs(max_num_tokens, use_cache, num_hidden_layers)


SETTINGS = (
    "remove_input_padding",
    "reduce_fusion",
    "gpt_attention_plugin",
    "paged_kv_cache",
    "tokens_per_block",
    "streamingllm",
)


class SlottedPluginConfig:
    """0.14 and 0.15: fields behind properties, and few of them."""

    __slots__ = tuple(f"_{name}" for name in SETTINGS)

    def __init__(self, **values: Any) -> None:
        for name in SETTINGS:
            setattr(self, f"_{name}", values[name])


for _name in SETTINGS:
    setattr(SlottedPluginConfig, _name, property(lambda self, n=f"_{_name}": getattr(self, n)))


def forget_ours() -> None:
    """What our modules have imported, so that the next import finds another version."""
    package = importlib.import_module(PACKAGE)
    for name in OURS:
        sys.modules.pop(f"{PACKAGE}.{name}", None)
        vars(package).pop(name, None)


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Puts the fakes of a version into sys.modules."""

    def add(name: str, **content: Any) -> Any:
        module = types.ModuleType(name)
        vars(module).update(content, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)

    class VersionModel(DecoderModelForCausalLM):
        prepare_inputs = {
            "0.14": _prepare_inputs_0_14,
            "0.15": _prepare_inputs_0_15,
        }.get(version, _prepare_inputs_1_2)

        def mapping_shape(self, num_layers: int) -> list[int]:
            return [num_layers] if version in _OLD else [num_layers, 2]

    class LLaMAConfig(PretrainedConfig):
        def __init__(self, *, mlp_bias: bool = False, **kwargs: Any) -> None:
            self.mlp_bias = mlp_bias
            super().__init__(**kwargs)

    class GPTConfig(PretrainedConfig):
        pass

    class LLaMAForCausalLM(VersionModel):
        config_class = LLaMAConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config, Transformer(config), None)

    class GPTForCausalLM(VersionModel):
        config_class = GPTConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config, Transformer(config), None)

    models = {
        "LlamaForCausalLM": LLaMAForCausalLM,
        "MistralForCausalLM": LLaMAForCausalLM,
        "GPTForCausalLM": GPTForCausalLM,
    }
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.make())
    add("tensorrt_llm", __version__=version)
    names = ("default_net", "default_trtnet")
    add("tensorrt_llm._common", **{name: getattr(fake_trtllm, name) for name in names})
    add(
        "tensorrt_llm.functional",
        Tensor=fake_trtllm.Tensor,
        _create_tensor=fake_trtllm._create_tensor,
        allgather=fake_trtllm.allgather,
    )
    add("tensorrt_llm.module", Module=fake_trtllm.Module)
    add("tensorrt_llm.parameter", Parameter=fake_trtllm.Parameter)
    add("tensorrt_llm.models", MODEL_MAP=models)
    for family, config, model in (
        ("llama", LLaMAConfig, LLaMAForCausalLM),
        ("gpt", GPTConfig, GPTForCausalLM),
    ):
        add(f"tensorrt_llm.models.{family}")
        add(f"tensorrt_llm.models.{family}.config", **{config.__name__: config})
        add(f"tensorrt_llm.models.{family}.model", **{model.__name__: model})
    if version == "1.3":
        kinds = enum.Enum("KVCacheType", {"PAGED": "paged"}, type=str)
        add("tensorrt_llm.llmapi.kv_cache_type", KVCacheType=kinds)


def build(
    version, checkpoint, model_file, name, *,
    rank=0, tp_size=None, packed=True, fusion=False, weights=True, paged=None, streamingllm=False,
    **settings,
) -> Any:  # fmt: skip
    """trtllm-build's steps in its order: model file, config, model, network. `paged`: tokens of a
    block, where there is a paged KV cache."""
    from tensorrt_llm.models import MODEL_MAP

    loader = SourceFileLoader("models", str(model_file))
    module = types.ModuleType("models")
    loader.exec_module(module)
    model_class = getattr(module, name)
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    config = MODEL_MAP[config["architecture"]].config_class(**config)
    config = copy.deepcopy(config)
    config.mapping.rank = rank
    config.mapping.tp_size = tp_size or config.mapping.tp_size
    model = (
        model_class.from_checkpoint(checkpoint, config=config) if weights else model_class(config)
    )
    values = {
        "remove_input_padding": packed,
        "reduce_fusion": fusion,
        "gpt_attention_plugin": "auto" if paged else None,
        "paged_kv_cache": bool(paged),
        "tokens_per_block": paged,
        "streamingllm": streamingllm,
    }
    plugins: Any = SlottedPluginConfig(**values)
    if version not in _OLD:
        plugins = SimpleNamespace(**values, norm_quant_fusion=False)
    State.net = SimpleNamespace(trt_network=fake_tensorrt.Network(), plugin_config=plugins, dims={})
    State.model = model
    known = {"max_num_tokens": 64, "use_cache": True, **settings}
    if version in _OLD:
        known["gather_generation_logits"] = False
    model(**model.prepare_inputs(**known))
    return State.net.trt_network
