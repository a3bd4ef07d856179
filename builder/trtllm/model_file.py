# SPDX-License-Identifier: Apache-2.0
"""For trtllm-build's --model_cls_file, which executes it under a name of its own. The class itself
lies in a module that worker processes can import, where it registers itself again."""

from trtllm_engram.builder.trtllm.llama import EngramForCausalLM

__all__ = ["EngramForCausalLM"]
