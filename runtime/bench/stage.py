# SPDX-License-Identifier: Apache-2.0
"""Packed rows to MXFP8 operands: values, and scales in F8_128x4 order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .. import ops
from ..row import packed_row_bytes
from .gpu import OURS, Case, expect, load_torch
from .lookup import COLUMNS, HEAD_DIM, empty_operands, same_operands
from .rivals import VLLM, Rivals

_ROW = "MXFP8 staging"
_CHECKED_TOKENS = 64


def cases(tokens: Sequence[int], _table_gb: float, rivals: Rivals | None) -> Iterator[Case]:
    torch = load_torch()
    torch.manual_seed(0)
    row_bytes = packed_row_bytes(HEAD_DIM)
    for count in tokens:
        packed = torch.empty((count, COLUMNS * row_bytes), dtype=torch.uint8, device="cuda")
        yield _case(packed.random_(0, 256), rivals)


def _case(packed: Any, rivals: Rivals | None) -> Case:
    num_tokens = packed.shape[0]
    outs = [empty_operands(num_tokens) for _ in range(2)]
    contenders = {OURS: lambda: ops.stage_mxfp8(packed, HEAD_DIM, out=outs[0])}
    if rivals:
        contenders[VLLM] = rivals.vllm_stage(packed, HEAD_DIM, outs[1])
    few = packed[:_CHECKED_TOKENS].cpu().numpy()

    def check(name: str, operands: tuple[Any, Any]) -> None:
        """The first tokens against the CPU's, all against ours."""
        values, scales = ops.stage_mxfp8(few, HEAD_DIM)
        right = (operands[0][:_CHECKED_TOKENS].cpu().numpy() == values).all()
        if num_tokens <= _CHECKED_TOKENS:
            right = right and (operands[1].cpu().numpy() == scales).all()
        expect(bool(right) and same_operands(operands, outs[0]), _ROW, num_tokens, name)

    num_bytes = 2 * packed.numel()
    return Case(_ROW, num_tokens, num_bytes, contenders, check)
