# SPDX-License-Identifier: Apache-2.0
"""The gate of V4.1-Flash's size: 4 copies of 5120, residual and kv in BF16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .. import demo_check, ops
from .gpu import OURS, Case, Target, expect, load_torch
from .rivals import SGLANG, VLLM, Rivals

_ROW = "gate"
_HC_MULT = 4
_HIDDEN = 5120
_EPS = 1e-6
_CHECKED_TOKENS = 64
_MAX_ULPS = 1.0  # of |h| + |g * value|: sums in another order


def cases(tokens: Sequence[int], _table_gb: float, rivals: Rivals | None) -> Iterator[Case]:
    torch = load_torch()
    torch.manual_seed(0)
    for count in tokens:
        hidden = torch.randn(count, _HC_MULT, _HIDDEN, device="cuda").bfloat16()
        kv = torch.randn(count, (_HC_MULT + 1) * _HIDDEN, device="cuda").bfloat16()
        q_weight, k_weight = torch.randn(2, _HC_MULT, _HIDDEN, device="cuda").bfloat16()
        yield _case((hidden, kv, q_weight, k_weight), rivals)


def _case(inputs: tuple[Any, Any, Any, Any], rivals: Rivals | None) -> Case:
    torch = load_torch()
    hidden, kv, q_weight, k_weight = inputs
    num_tokens = hidden.shape[0]
    outs = [torch.empty_like(hidden) for _ in range(2)]
    contenders = {OURS: lambda: ops.gate(*inputs, _EPS, out=outs[0])}
    targets = []
    if rivals:
        contenders[VLLM] = rivals.vllm_gate(*inputs, _EPS, outs[1])
        contenders[SGLANG] = rivals.sglang_gate(*inputs, _EPS)
    if num_tokens <= 64 or num_tokens == 8192:
        targets.append(Target(VLLM, ratio=0.75))
    if num_tokens == 8192:
        targets.append(Target(SGLANG, ratio=1.0))
    few = slice(0, _CHECKED_TOKENS)
    host = (_bf16(hidden[few]), _bf16(kv[few]), _bf16(q_weight), _bf16(k_weight))
    expected, magnitude = demo_check.gate(*host, _EPS)

    def check(name: str, out: Any) -> None:
        """The first tokens against FP64; all against ours, which may round once apart."""
        ulps = demo_check.max_ulps(_bf16(out[few]), expected, magnitude)
        close = torch.allclose(out.float(), outs[0].float(), rtol=2.0**-6, atol=2.0**-6)
        expect(ulps <= _MAX_ULPS and close, _ROW, num_tokens, name)

    num_bytes = sum(array.nbytes for array in inputs) + hidden.nbytes
    return Case(_ROW, num_tokens, num_bytes, contenders, check, targets)


def _bf16(tensor: Any) -> npt.NDArray[Any]:
    bits: npt.NDArray[np.int16] = tensor.contiguous().view(load_torch().int16).cpu().numpy()
    return bits.view(ml_dtypes.bfloat16)
