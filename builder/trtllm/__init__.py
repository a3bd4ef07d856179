# SPDX-License-Identifier: Apache-2.0
"""Engram layers in decoders of TensorRT-LLM, built by its own trtllm-build.

    trtllm-engram trtllm-checkpoint STORE --base CHECKPOINT --output DIR
    trtllm-build --checkpoint_dir DIR --model_cls_file $(trtllm-engram trtllm-model-file) \\
        --model_cls_name EngramForCausalLM ...

    section.py      the object `engram` of a checkpoint's config.json
    checkpoint.py   writes config.json and the ranks' files
    model_file.py   what trtllm-build executes
    llama.py        EngramForCausalLM: the Llama family
    model.py        what makes any decoder one with Engram layers
    phantom.py      history in the KV cache of TensorRT-LLM's executor
    memory.py       the hash node, and the layers with their weights
    front_end.py    TensorRT-LLM's surfaces, which change between its versions

The last six import tensorrt_llm, and nothing else in the project does.
"""

from pathlib import Path

MODEL_FILE = Path(__file__).resolve().with_name("model_file.py")
