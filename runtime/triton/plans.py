# SPDX-License-Identifier: Apache-2.0
"""Looks at a plan before a model is written with it."""

from __future__ import annotations

import re
from pathlib import Path

from trtllm_engram.builder.model import hidden_name, hidden_out_name
from trtllm_engram.plugins.errors import InputError

from ..engine import Engine, TensorInfo
from ..store import Store

_NUM_PROFILES = 2  # decode and prefill, of builder.engine.default_profiles


def check_fingerprint(plan: Path, content: bytes, store: Store) -> None:
    """Plans hold the fingerprint of their tables' layout as it is: one that has others alone is of
    another store. Needs no TensorRT."""
    own = store.manifest.fingerprint
    if own.encode() in content:
        return
    other = re.search(rb"[0-9a-f]{64}", content)
    if other is not None:
        raise InputError(
            f"{plan}: expected an engine of {store.path}, whose fingerprint is {own}, found one "
            f"of {other[0].decode()}"
        )


def check_flat_engine(plan: Path, engine: Engine, store: Store, hidden_dtype: str) -> int:
    """How many requests an engine takes. Refuses one that is not of `build --flat-hidden` for this
    store."""
    config = store.config
    window = TensorInfo("int32", (None, config.max_ngram_size - 1))
    tokens = TensorInfo("int32", (None,))
    inputs = {
        "token_ids": tokens,
        "positions": TensorInfo("int64", (None,)),
        "cu_seqlens": tokens,
        "lookback_ids": window,
    } | {hidden_name(layer): TensorInfo(hidden_dtype, (None,)) for layer in config.layer_ids}
    outputs = {hidden_out_name(layer): hidden_dtype for layer in config.layer_ids}
    outputs["next_lookback_ids"] = window.dtype
    wanted = "of `build --flat-hidden` for this store"
    if engine.inputs.keys() != inputs.keys():
        found = ", ".join(engine.inputs)
        raise InputError(f"{plan}: expected inputs {', '.join(inputs)}, {wanted}, found {found}")
    for name, expected in inputs.items():
        if engine.inputs[name] != expected:
            raise InputError(
                f"{plan}: {name}: expected {_shown(expected)}, {wanted}, found "
                f"{_shown(engine.inputs[name])}"
            )
    for name, dtype in outputs.items():
        if name not in engine.outputs or engine.outputs[name].dtype != dtype:
            found = engine.outputs[name].dtype if name in engine.outputs else "none"
            raise InputError(f"{plan}: expected an output {name} {dtype}, {wanted}, found {found}")
    if engine.num_profiles != _NUM_PROFILES:
        raise InputError(
            f"{plan}: expected {_NUM_PROFILES} profiles, {wanted}, found {engine.num_profiles}"
        )
    return min(_check_profile(plan, engine, store, profile) for profile in range(_NUM_PROFILES))


def _check_profile(plan: Path, engine: Engine, store: Store, profile: int) -> int:
    """The most requests."""
    (num_tokens,) = engine.shape_range("token_ids", profile)[1]
    num_values = num_tokens * store.config.hc_mult * store.config.hidden_size
    for name in map(hidden_name, store.config.layer_ids):
        (found,) = engine.shape_range(name, profile)[1]
        if found != num_values:
            raise InputError(
                f"{plan}: {name}: expected {num_values} values of {num_tokens} tokens, as this "
                f"store's residual stream has them, found {found}"
            )
    (num_bounds,) = engine.shape_range("cu_seqlens", profile)[1]
    return num_bounds - 1


def _shown(info: TensorInfo) -> str:
    return f"{info.dtype} {[size or 'any' for size in info.shape]}"
