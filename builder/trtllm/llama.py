# SPDX-License-Identifier: Apache-2.0
"""The Llama family (Mistral and what else shares its class) with Engram layers."""

from __future__ import annotations

from tensorrt_llm.models.llama.config import LLaMAConfig
from tensorrt_llm.models.llama.model import LLaMAForCausalLM

from trtllm_engram.builder.trtllm.model import EngramConfigMixin, EngramDecoderMixin, set_up


class EngramLLaMAConfig(EngramConfigMixin, LLaMAConfig):  # type: ignore[misc]
    pass


class EngramForCausalLM(EngramDecoderMixin, LLaMAForCausalLM):  # type: ignore[misc]
    config_class = EngramLLaMAConfig


set_up(EngramForCausalLM)
