# SPDX-License-Identifier: Apache-2.0
"""Rows of a table in GPU memory by uniform random ids: to BF16, packed, and to MXFP8 operands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .. import demo_check, ops
from ..row import num_blocks, packed_row_bytes, staged_scale_bytes
from .gpu import EMPTY, OURS, Case, Target, expect, load_torch
from .rivals import SGLANG, VLLM, Rivals

COLUMNS = 24
HEAD_DIM = 256
_ROW_SCALES = num_blocks(HEAD_DIM)
_CHECKED_TOKENS = 64
_DEPTH = 2  # an id, its row
_NEAR_EMPTY = Target(EMPTY, over_us=2.0)


def cases(tokens: Sequence[int], table_gb: float, rivals: Rivals | None) -> Iterator[Case]:
    torch = load_torch()
    torch.manual_seed(0)
    num_rows = max(1, int(table_gb * 1e9) // packed_row_bytes(HEAD_DIM))
    # No NaN, and scales that keep every result normal.
    values = torch.empty((num_rows, HEAD_DIM), dtype=torch.uint8, device="cuda").random_(0, 127)
    scales = torch.empty((num_rows, _ROW_SCALES), dtype=torch.uint8, device="cuda")
    scales.random_(120, 128)
    all_ids = [
        torch.randint(num_rows, (count, COLUMNS), dtype=torch.int32, device="cuda")
        for count in tokens
    ]
    for make in (_to_bf16, _packed, _to_mxfp8):
        for ids in all_ids:
            yield make(values, scales, ids, rivals)


def _to_bf16(values: Any, scales: Any, ids: Any, rivals: Rivals | None) -> Case:
    torch = load_torch()
    num_tokens = ids.shape[0]
    shape = (num_tokens, COLUMNS * HEAD_DIM)
    outs = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    contenders = {OURS: lambda: ops.lookup(values, scales, ids, out=outs[0])}
    targets = [_NEAR_EMPTY] if num_tokens <= 64 else []
    if rivals:
        contenders[VLLM] = rivals.vllm_lookup(values, scales, ids, outs[1])
        contenders[SGLANG] = rivals.sglang_lookup(values, scales, ids, outs[2])
    if num_tokens == 8192:
        targets = [Target(VLLM, ratio=0.30), Target(SGLANG, ratio=0.40)]

    def check(name: str, rows: Any) -> None:
        bits = rows.view(torch.int16)
        few = slice(0, _CHECKED_TOKENS)
        table_rows = ids[few].long()
        expected = demo_check.rows(
            values[table_rows].view(-1, HEAD_DIM).cpu().numpy(),
            scales[table_rows].view(-1, _ROW_SCALES).cpu().numpy(),
            np.arange(table_rows.numel(), dtype=np.int32).reshape(table_rows.shape),
        )
        right = np.array_equal(bits[few].cpu().numpy(), expected.view(np.int16))
        same = torch.equal(bits, outs[0].view(torch.int16))
        expect(right and same, "lookup to BF16", num_tokens, name)

    row_bytes = 4 + packed_row_bytes(HEAD_DIM) + np.dtype(ml_dtypes.bfloat16).itemsize * HEAD_DIM
    num_bytes = ids.numel() * row_bytes
    return Case("lookup to BF16", num_tokens, num_bytes, contenders, check, targets, _DEPTH)


def _packed(values: Any, scales: Any, ids: Any, rivals: Rivals | None) -> Case:
    num_tokens = ids.shape[0]
    outs = [empty_packed(num_tokens) for _ in range(2)]
    contenders = {OURS: lambda: ops.lookup_packed(values, scales, ids, out=outs[0])}
    if rivals:
        contenders[VLLM] = rivals.vllm_lookup(values, scales, ids, outs[1])
    torch = load_torch()

    def check(name: str, packed: Any) -> None:
        expected = torch.cat([values[ids.long()], scales[ids.long()]], dim=-1)
        same = torch.equal(packed, expected.view(num_tokens, -1))
        expect(same, "lookup packed", num_tokens, name)

    row_bytes = 4 + 2 * packed_row_bytes(HEAD_DIM)
    num_bytes = ids.numel() * row_bytes
    return Case("lookup packed", num_tokens, num_bytes, contenders, check, depth=_DEPTH)


def _to_mxfp8(values: Any, scales: Any, ids: Any, rivals: Rivals | None) -> Case:
    """Ours writes the operands at once; vLLM packs rows, then stages them."""
    num_tokens = ids.shape[0]
    outs = [empty_operands(num_tokens) for _ in range(2)]
    contenders: Mapping[str, Any] = {
        OURS: lambda: ops.lookup_mxfp8(values, scales, ids, scale_order="128x4", out=outs[0])
    }
    if rivals:
        packed = empty_packed(num_tokens)
        look_up = rivals.vllm_lookup(values, scales, ids, packed)
        stage = rivals.vllm_stage(packed, HEAD_DIM, outs[1])
        contenders = {**contenders, VLLM: lambda: (look_up(), stage())[1]}
    rows = "lookup to MXFP8"

    def check(name: str, operands: Any) -> None:
        packed_rows = ops.lookup_packed(values, scales, ids)
        same = same_operands(operands, ops.stage_mxfp8(packed_rows, HEAD_DIM))
        expect(same, rows, num_tokens, name)

    row_bytes = 4 + 2 * packed_row_bytes(HEAD_DIM)
    targets = [Target(VLLM, ratio=0.25)] if num_tokens == 8192 else []
    num_bytes = ids.numel() * row_bytes
    return Case(rows, num_tokens, num_bytes, contenders, check, targets, _DEPTH)


def empty_operands(num_tokens: int) -> tuple[Any, Any]:
    """Values [T, C*D] and scales in F8_128x4 order, poisoned: whatever is not written shows."""
    torch = load_torch()
    scale_bytes = staged_scale_bytes(num_tokens, COLUMNS * _ROW_SCALES)
    shapes = [(num_tokens, COLUMNS * HEAD_DIM), (scale_bytes,)]
    values, scales = (torch.full(shape, 0xA5, dtype=torch.uint8, device="cuda") for shape in shapes)
    return values, scales


def same_operands(found: tuple[Any, Any], expected: tuple[Any, Any]) -> bool:
    return all(load_torch().equal(*pair) for pair in zip(found, expected, strict=True))


def empty_packed(num_tokens: int) -> Any:
    torch = load_torch()
    shape = (num_tokens, COLUMNS * packed_row_bytes(HEAD_DIM))
    return torch.full(shape, 0xA5, dtype=torch.uint8, device="cuda")
