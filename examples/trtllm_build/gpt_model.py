# SPDX-License-Identifier: Apache-2.0
"""Another family with Engram layers: give this file to trtllm-build's --model_cls_file."""

from tensorrt_llm.models.gpt.config import GPTConfig
from tensorrt_llm.models.gpt.model import GPTForCausalLM

from trtllm_engram.builder.trtllm.model import EngramConfigMixin, EngramDecoderMixin, set_up


class EngramGPTConfig(EngramConfigMixin, GPTConfig):
    pass


class EngramGPTForCausalLM(EngramDecoderMixin, GPTForCausalLM):
    config_class = EngramGPTConfig


set_up(EngramGPTForCausalLM)
