# SPDX-License-Identifier: Apache-2.0
"""Base checkpoints as fake_trtllm's decoders have them, and what such a decoder computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from fake_trtllm import step
from safetensors.numpy import load_file, save_file

from trtllm_engram.runtime import Store, ops

NUM_LAYERS = 6
STORE = {"hc_mult": 1, "layers": (1, 2), "hidden_size": 64}


def base_checkpoint(folder: Path, store: Store, *, seed: int = 1, **changes: Any) -> Path:
    """config.json and a file for each rank; `changes` go into config.json."""
    folder.mkdir()
    config = {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "hidden_size": store.config.hidden_size,
        "num_hidden_layers": NUM_LAYERS,
        "vocab_size": store.token_map.size,
        "mlp_bias": False,
    }
    config |= changes
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    hidden = store.config.hidden_size * store.config.hc_mult

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.3).astype(ml_dtypes.bfloat16)

    embedding = draw(store.token_map.size, hidden)
    layers = [draw(hidden, hidden) for _ in range(NUM_LAYERS)]
    mapping = config.get("mapping", {})
    stages = mapping.get("pp_size", 1)
    share = NUM_LAYERS // stages
    for rank in range(stages * mapping.get("tp_size", 1)):
        stage = rank // mapping.get("tp_size", 1)
        tensors = {
            f"transformer.layers.{index}.attention.dense.weight": layers[stage * share + index]
            for index in range(share)
        }
        if stage == 0:
            tensors["transformer.vocab_embedding.weight"] = embedding
        save_file(tensors, folder / f"rank{rank}.safetensors")
    return folder


def decode(store: Store, base: Path, token_ids: np.ndarray, num_layers: int = NUM_LAYERS) -> Any:
    """The residual stream [T, hidden] of one request's tokens, with the store's layers in it."""
    weights = load_file(base / "rank0.safetensors")
    bounds = np.array([0, token_ids.size], np.int32)
    positions = np.arange(token_ids.size, dtype=np.int32)
    ids = ops.hash_ids(store.layout, store.token_map, token_ids, positions, bounds)
    hidden = weights["transformer.vocab_embedding.weight"][token_ids]
    for layer in range(num_layers):
        if layer in store.config.layer_ids:
            own, table = store.weights(layer), store.table(layer)
            columns = np.ascontiguousarray(ids[:, store.config.layer_ids.index(layer)])
            rows = ops.lookup(table.values, table.scales, columns)
            kv = ops.project(rows, own.wkv_weight, own.wkv_scale)
            copies = hidden.reshape(-1, store.config.hc_mult, store.config.hidden_size)
            eps = store.config.rms_norm_eps
            hidden = ops.gate(copies, kv, own.q_weight, own.k_weight, eps).reshape(hidden.shape)
        hidden = step(hidden, weights[f"transformer.layers.{layer}.attention.dense.weight"])
    return hidden
