# SPDX-License-Identifier: Apache-2.0
"""Writes a small checkpoint in TensorRT-LLM's form with made-up weights, of the hidden size and
vocabulary of a store; for a real model, convert_checkpoint.py of TensorRT-LLM writes it.

    python base_checkpoint.py STORE FOLDER [--family gpt] [--layers N]
"""

import argparse
import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from trtllm_engram.runtime import open_store

HEADS = 4
POSITIONS = 512
CONFIGS = {
    "llama": {
        "architecture": "LlamaForCausalLM",
        "hidden_act": "silu",
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 10000.0,
    },
    "gpt": {
        "architecture": "GPTForCausalLM",
        "hidden_act": "gelu",
        "position_embedding_type": "learned_absolute",
        "bias": True,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=CONFIGS, default="llama")
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    store = open_store(args.store)
    hidden, vocab = store.config.hidden_size, store.token_map.size
    config = {
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": HEADS,
        "norm_epsilon": 1e-5,
        "max_position_embeddings": POSITIONS,
        **CONFIGS[args.family],
    }
    args.folder.mkdir()
    tensors = weights(args.family, hidden, vocab, args.layers)
    save_file(tensors, args.folder / "rank0.safetensors")
    (args.folder / "config.json").write_text(json.dumps(config, indent=2))


def weights(family: str, hidden: int, vocab: int, num_layers: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(8)

    def draw(*shape: int) -> np.ndarray:
        scale = shape[-1] ** -0.5
        return (rng.standard_normal(shape) * scale).astype(ml_dtypes.bfloat16)

    ones = np.ones(hidden, ml_dtypes.bfloat16)
    tensors = {
        "transformer.vocab_embedding.weight": draw(vocab, hidden),
        "transformer.ln_f.weight": ones,
        "lm_head.weight": draw(vocab, hidden),
    }
    for layer in range(num_layers):
        prefix = f"transformer.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.post_layernorm.weight": ones,
            f"{prefix}.attention.qkv.weight": draw(3 * hidden, hidden),
            f"{prefix}.attention.dense.weight": draw(hidden, hidden),
            f"{prefix}.mlp.fc.weight": draw(2 * hidden, hidden),
            f"{prefix}.mlp.proj.weight": draw(hidden, 2 * hidden),
        }
        if family == "llama":
            tensors[f"{prefix}.mlp.gate.weight"] = draw(2 * hidden, hidden)
    if family == "gpt":
        tensors["transformer.position_embedding.weight"] = draw(POSITIONS, hidden)
        biased = [name for name in tensors if "layers." in name or "ln_f" in name]
        tensors |= {
            f"{name.removesuffix('weight')}bias": np.zeros(len(tensors[name]), ml_dtypes.bfloat16)
            for name in biased
        }
    return tensors


if __name__ == "__main__":
    main()
