# SPDX-License-Identifier: Apache-2.0
"""The projection of V4.1-Flash: [T, 6144] x [25600, 6144], against cuBLAS on BF16 weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trtllm_engram.builder.weight_layout import lay_fastest

from .. import ops
from .gpu import OURS, Case, Target, expect, load_torch
from .rivals import Rivals

_ROW = "projection"
_CUBLAS = "cuBLAS BF16"
_IN, _OUT = 6144, 25600
_BLOCK = 32
_CHECKED_OUTPUTS = 512
_RATIOS = ((16, 0.55), (64, 0.58), (256, 0.80))  # of cuBLAS, up to so many tokens; then 1
_SUM_ERROR = 2.0**-23  # of the absolute terms, for each addition
_ROUNDING = 2.0**-8  # half an ulp of BF16


def cases(tokens: Sequence[int], _table_gb: float, _rivals: Rivals | None) -> Iterator[Case]:
    torch = load_torch()
    torch.manual_seed(0)
    weight = torch.randint(0, 256, (_OUT, _IN), device="cuda", dtype=torch.uint8)
    weight &= 0xFB  # no NaN
    scale = torch.randint(112, 124, (_OUT // _BLOCK, _IN // _BLOCK), device="cuda").byte()
    exact = _dequantized(weight, scale)
    on_host = weight.cpu().numpy()
    laid_on_host, layout = lay_fastest(on_host, torch.cuda.get_device_capability())
    laid = torch.from_numpy(laid_on_host).cuda()
    for count in tokens:
        x = torch.randn(count, _IN, device="cuda").bfloat16()
        yield _case(x, laid, layout, scale, exact)


def _case(x: Any, weight: Any, layout: str, scale: Any, exact: Any) -> Case:
    torch = load_torch()
    num_tokens = x.shape[0]
    outs = [torch.empty(num_tokens, _OUT, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    inputs, factors = x.double(), exact[:_CHECKED_OUTPUTS].double()
    expected = inputs @ factors.T
    error = inputs.abs() @ factors.abs().T * (_IN * _SUM_ERROR) + expected.abs() * _ROUNDING

    def check(name: str, out: Any) -> None:
        """The first outputs against FP64, within FP32's own error and one rounding; all against
        ours."""
        holds = ((out[:, :_CHECKED_OUTPUTS].double() - expected).abs() <= error).all()
        close = torch.allclose(out.float(), outs[0].float(), rtol=2.0**-6, atol=2.0**-4)
        expect(bool(holds) and close, _ROW, num_tokens, name)

    ratio = next((ratio for most, ratio in _RATIOS if num_tokens <= most), 1.0)
    return Case(
        row=_ROW,
        num_tokens=num_tokens,
        num_bytes=sum(array.nbytes for array in (x, weight, scale, outs[0])),
        contenders={
            OURS: lambda: ops.project(x, weight, scale, weight_layout=layout, out=outs[0]),
            _CUBLAS: lambda: torch.mm(x, exact.T, out=outs[1]),
        },
        check=check,
        targets=[Target(_CUBLAS, ratio=ratio)],
        num_products=num_tokens * _IN * _OUT,
    )


def _dequantized(weight: Any, scale: Any) -> Any:
    """BF16: exact, for scales this far from BF16's limits."""
    torch = load_torch()
    values = weight.view(torch.float8_e4m3fn).bfloat16()
    factors = torch.exp2(scale.float() - 127).bfloat16()
    return values * factors.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
