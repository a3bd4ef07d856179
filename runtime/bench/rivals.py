# SPDX-License-Identifier: Apache-2.0
"""Kernels of vLLM and SGLang, from the folder that `rivals/fetch.py` writes, launched as their own
projects launch them. Nothing of theirs is in this file but the order of arguments."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtllm_engram.plugins.errors import InputError

from .gpu import load_torch

Run = Callable[[], Any]

VLLM = "vLLM"
SGLANG = "SGLang"

_SCALE_BLOCK = 32
_LOOKUP_ROWS = 16  # of a program
_HASH_TOKENS = 32
_TILE_ROWS = 128
_CLAMP = 1e-6


class Rivals:
    """The kernels in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, Any] = {}
        for name in ("vllm_engram", "engram_gather", "engram_hash", "engram_gate"):
            if not self._file(name).is_file():
                raise InputError(f"--rivals: {folder}: expected {name}.py, found none")

    def vllm_hash(
        self,
        token_map: Any,
        pad_id: int,
        constants: tuple[Any, Any, Any],
        tokens: Any,
        positions: Any,
        cu_seqlens: Any,
        lookback: Any,
        out: Any,
    ) -> Run:
        """constants: multipliers [L, N], primes [L, C] and offsets [L, C]."""
        torch = load_torch()
        multipliers, primes, _ = constants
        num_layers, max_ngram = multipliers.shape
        num_heads = primes.shape[1] // (max_ngram - 1)
        no_dead = torch.zeros_like(tokens, dtype=torch.bool)
        no_dead_lookback = torch.zeros_like(lookback, dtype=torch.bool)
        grid = (-(-tokens.numel() // _HASH_TOKENS), num_layers)

        def run() -> Any:
            self._load("vllm_engram")._hash_ids_kernel[grid](
                tokens,
                token_map,
                no_dead,
                positions,
                None,
                cu_seqlens,
                *constants,
                None,
                lookback,
                no_dead_lookback,
                out,
                tokens.numel(),
                0,
                pad_id,
                input_stride=1,
                mask_stride=1,
                position_stride=1,
                table_stride=0,
                table_col_stride=0,
                query_stride=1,
                num_query_rows=cu_seqlens.numel() - 1,
                num_table_rows=0,
                max_blocks=0,
                cache_block_size=1,
                MAX_NGRAM=max_ngram,
                num_heads=num_heads,
                BLOCK_T=_HASH_TOKENS,
                BLOCK_H=1 << (num_heads - 1).bit_length(),
                dead_id=-1,
                lookback_depth=lookback.shape[1],
                lookback_row_stride=lookback.stride(0),
                lookback_col_stride=lookback.stride(1),
                lookback_mask_row_stride=no_dead_lookback.stride(0),
                lookback_mask_col_stride=no_dead_lookback.stride(1),
                num_warps=4,
            )
            return out

        return run

    def sglang_hash(
        self,
        token_map: Any,
        pad_id: int,
        constants: tuple[Any, Any, Any],
        tokens: Any,
        positions: Any,
        starts: Any | None,
        rows: Any,
        lookback: Any,
    ) -> Run:
        """starts None: a decode step of one token per request; else rows names each token's."""
        module = self._load("engram_hash")
        multipliers, primes, offsets = constants
        orders = multipliers.shape[1] - 1
        history = lookback.flip(1).contiguous()
        return lambda: module.engram_hash_ids(
            tokens,
            positions,
            mode=module.MODE_DECODE if starts is None else module.MODE_EXTEND,
            history=history,
            token_map=token_map,
            multipliers=multipliers,
            primes=primes.view(primes.shape[0], orders, -1),
            offsets=offsets,
            pad_id=pad_id,
            row=None if starts is None else rows,
            starts=starts,
        )[0]

    def vllm_lookup(self, values: Any, scales: Any, ids: Any, out: Any) -> Run:
        """out: BF16 [T, C*D], or uint8 [T, C*(D+D/32)] for packed rows."""
        torch = load_torch()
        num_tokens, num_columns = ids.shape
        num_rows = num_tokens * num_columns
        head_dim = values.shape[1]
        num_sms = torch.cuda.get_device_properties(ids.device).multi_processor_count
        grid = min(-(-num_rows // _LOOKUP_ROWS), num_sms)
        weight = values.view(torch.float8_e4m3fn)

        def run() -> Any:
            self._load("vllm_engram")._engram_lookup_kernel[(grid,)](
                weight,
                scales,
                ids,
                ids,
                out,
                0,
                values.shape[0],
                num_rows,
                *ids.stride(),
                HEAD_START=0,
                LOCAL_HEADS=num_columns,
                TOTAL_HEADS=num_columns,
                DIM=head_dim,
                QUANT_BLOCK=_SCALE_BLOCK,
                BLOCK_R=_LOOKUP_ROWS,
                GRID=grid,
                SORTED=False,
                PACKED=out.dtype == torch.uint8,
                OUT_STRIDE=out.stride(0),
                PEER_ROWS=0,
            )
            return out

        return run

    def sglang_lookup(self, values: Any, scales: Any, ids: Any, out: Any) -> Run:
        head_dim = values.shape[1]
        rows = out.view(-1, head_dim)
        flat_ids = ids.reshape(-1)
        gather = self._load("engram_gather").engram_gather

        def run() -> Any:
            gather(values.data_ptr(), scales.data_ptr(), flat_ids, rows, head_dim, _SCALE_BLOCK)
            return out

        return run

    def vllm_stage(self, packed: Any, head_dim: int, out: tuple[Any, Any]) -> Run:
        num_tokens, row_bytes = packed.shape
        num_columns = row_bytes // (head_dim + head_dim // _SCALE_BLOCK)
        values, scales = out
        tiles = -(-num_tokens // _TILE_ROWS)
        grid = (tiles * _TILE_ROWS * num_columns // _LOOKUP_ROWS, 1)

        def run() -> Any:
            self._load("vllm_engram")._engram_unpack_fp8_kernel[grid](
                packed,
                values,
                scales,
                num_tokens,
                0,
                0,
                HEADS=num_columns,
                LOCAL_HEADS=num_columns,
                LAYERS=1,
                RANK=0,
                DIM=head_dim,
                BLOCK=_LOOKUP_ROWS,
                PEER=False,
            )
            return out

        return run

    def vllm_gate(self, hidden: Any, kv: Any, q: Any, k: Any, eps: float, out: Any) -> Run:
        num_tokens, hc_mult, hidden_size = hidden.shape
        block = 1 << (hidden_size - 1).bit_length()

        def run() -> Any:
            self._load("vllm_engram")._fused_engram_post_wkv_kernel[(num_tokens * hc_mult,)](
                hidden,
                kv,
                q,
                k,
                hidden,
                out,
                num_tokens,
                *hidden.stride(),
                *kv.stride(),
                *q.stride(),
                *k.stride(),
                0,
                *out.stride(),
                eps,
                _CLAMP,
                DIM=hidden_size,
                HC_MULT=hc_mult,
                BLOCK_SIZE=block,
                HAS_MASK=False,
                num_warps=8 if block >= 2048 else 4,
            )
            return out

        return run

    def sglang_gate(self, hidden: Any, kv: Any, q: Any, k: Any, eps: float) -> Run:
        module = self._load("engram_gate")
        return lambda: module.fused_engram_gate(hidden, kv, q, k, eps, _CLAMP)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.py"

    def _load(self, name: str) -> Any:
        if name not in self._modules:
            self._modules[name] = _import(name, self._file(name))
        return self._modules[name]


def _import(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"--rivals: {file}: expected a Python file, found something else")
    module = importlib.util.module_from_spec(spec)
    # The lookup's decorator asks for it; fetch.py leaves its definition behind.
    module.__dict__["_SORTED_IS_CONSTEXPR"] = True
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise InputError(f"--rivals: {file}: {error}") from None
    return module
