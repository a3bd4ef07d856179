# SPDX-License-Identifier: Apache-2.0
"""What makes a decoder of TensorRT-LLM one with Engram layers. A model file of another family:

    class EngramGPTConfig(EngramConfigMixin, GPTConfig): ...

    class EngramGPTForCausalLM(EngramDecoderMixin, GPTForCausalLM):
        config_class = EngramGPTConfig

    set_up(EngramGPTForCausalLM)

The residual stream goes through a layer's Engram module before it enters the decoder's layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_engram.builder.trtllm import front_end, phantom
from trtllm_engram.builder.trtllm.memory import EngramMemory
from trtllm_engram.builder.trtllm.section import EngramSection
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.plugins.registration import register


def set_up(model_class: Any) -> None:
    """Registers the plugins with TensorRT and the class with TensorRT-LLM, in this process."""
    register()
    front_end.add_architecture(model_class)


class EngramConfigMixin:
    """A config class whose config.json has the object `engram` (section.py)."""

    def __init__(self, *, engram: Mapping[str, Any], **kwargs: Any) -> None:
        self.engram = dict(engram)
        super().__init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """What an engine's config.json tells the executor."""
        data: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        return phantom.cache_layers(data) if self.engram["history"] == "kv_phantom" else data


class EngramDecoderMixin:
    """Goes before a subclass of DecoderModelForCausalLM."""

    config: Any
    transformer: Any
    engram: EngramMemory | None

    def __init__(self, config: Any) -> None:
        section = EngramSection.from_dict(config.engram)
        _check_base(type(self), section)
        _check_config(config, section)
        super().__init__(config)  # type: ignore[call-arg]
        self._slot_bytes = 0
        if section.history == "kv_phantom":
            phantom.check_config(config)
            phantom.shift_layers(self.decoder_layers())
            self._slot_bytes = phantom.slot_bytes(config)
        self.engram = None
        if config.mapping.is_first_pp_rank():  # where input_ids comes in
            group = config.mapping.tp_group
            self.engram = EngramMemory(section, config.vocab_size, group)
            for layer_id in section.config.layer_ids:
                _put_before(self.decoder_layers()[layer_id], self.engram, layer_id)

    def decoder_layers(self) -> Sequence[Any]:
        """The layers of this pipeline stage, for families that keep them elsewhere to override."""
        layers: Sequence[Any] = self.transformer.layers
        return layers

    def prepare_inputs(self, **kwargs: Any) -> dict[str, Any]:
        prepare = super().prepare_inputs  # type: ignore[misc]
        if self.engram is not None:
            front_end.refuse_fusions()
            _check_inputs(self.engram.section, kwargs, self.config)
            if self.engram.section.history == "kv_phantom":
                kwargs = phantom.with_layer(prepare, kwargs, self.config)
        inputs: dict[str, Any] = prepare(**kwargs)
        return inputs if self.engram is None else self.engram.add_inputs(inputs)

    def forward(self, **inputs: Any) -> Any:
        if self.engram is not None:
            inputs = self.engram.hash(inputs, self._slot_bytes)
        return super().forward(**inputs)  # type: ignore[misc]


def _put_before(layer: Any, engram: EngramMemory, layer_id: int) -> None:
    """The layer keeps its class and its parameters' names, so a base checkpoint still fits."""
    decode = layer.forward

    def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return decode(engram.add(layer_id, hidden_states), *args, **kwargs)

    layer.forward = forward


def _check_base(model_class: type, section: EngramSection) -> None:
    base = front_end.base_class(section.base_architecture)
    if base is None or not issubclass(model_class, base):
        raise InputError(
            f"engram.base_architecture: expected one that {model_class.__name__} extends, found "
            f"{section.base_architecture!r}; examples/trtllm_build shows how another is extended"
        )


def _check_config(config: Any, section: EngramSection) -> None:
    own, mapping = section.config, config.mapping
    if getattr(mapping, "cp_size", 1) > 1:
        raise InputError(
            f"mapping.cp_size: expected 1, found {mapping.cp_size}: context parallelism hands each "
            "rank a part of the tokens, and an n-gram needs those before them"
        )
    if config.hidden_size != own.hidden_size or getattr(config, "hc_mult", 1) != own.hc_mult:
        raise InputError(
            f"hidden_size, hc_mult: expected {own.hidden_size}, {own.hc_mult} (engram.config), "
            f"found {config.hidden_size}, {getattr(config, 'hc_mult', 1)}"
        )
    if section.projection_ranks not in (1, mapping.tp_size):
        raise InputError(
            f"mapping.tp_size: expected {section.projection_ranks}, as many ranks as "
            f"trtllm-checkpoint split the projection among, found {mapping.tp_size}"
        )
    here = mapping.pp_layers(config.num_hidden_layers)
    first = mapping.is_first_pp_rank()
    lost = [layer_id for layer_id in own.layer_ids if (layer_id in here) != first]
    if lost:
        raise InputError(
            f"engram_layer_ids: expected layers of the first of {mapping.pp_size} pipeline stages, "
            f"found layer {lost[0]}: only a rank that gets input_ids has row ids; use fewer "
            "stages, or tensor parallelism"
        )


def _check_inputs(section: EngramSection, settings: Mapping[str, Any], config: Any) -> None:
    """Settings of trtllm-build with which rows would be wrong."""
    if section.history == "kv_phantom":
        phantom.check_settings(settings, config)
    elif settings.get("max_draft_len"):
        raise InputError(
            f"--max_draft_len: expected 0 with history {section.history}, found "
            f"{settings['max_draft_len']}: position_ids does not follow draft tokens"
        )
    if settings.get("prompt_embedding_table_size"):
        raise InputError(
            "--max_prompt_embedding_table_size: expected 0, found "
            f"{settings['prompt_embedding_table_size']}: ids of prompt embeddings are no tokens"
        )
    if section.history == "whole_prompt" and settings.get("use_cache"):
        raise InputError(
            "--kv_cache_type: expected disabled with history whole_prompt, found a KV cache: "
            "a generation step's token would have no past; history explicit has one"
        )
