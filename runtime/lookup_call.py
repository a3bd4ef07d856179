# SPDX-License-Identifier: Apache-2.0
"""A lookup's call, once it is known which rows it reads: what it writes, and the workspace of its
path. ops.py looks up in arrays, tables.py in tables by name."""

from __future__ import annotations

from typing import Literal

from trtllm_engram.plugins.errors import InputError

from . import _native
from .arrays import BF16, INT32, UINT8, Array
from .call import Call, output_pair
from .row import num_blocks, packed_row_bytes, staged_scale_bytes

# New arrays hold bytes, which every framework has a dtype for; `out` may have the exact one.
FP8_BYTES = ("uint8", "float8_e4m3fn")
E8M0_BYTES = ("uint8", "float8_e8m0fnu")

ScaleOrder = Literal["linear", "128x4"]


def take_ids(call: Call, args: _native.LookupArgs) -> _native.LookupArgs:
    """Adds the call's ids: int32 [T, C], tokens may be apart."""
    ids = call.input("ids", INT32, (None, None), strided=True)
    num_tokens, num_columns = ids.shape
    stride, rest = divmod(ids.strides[0], ids.item_bytes) if num_tokens > 1 else (num_columns, 0)
    if rest or stride < num_columns:
        raise InputError(
            f"{call.op}: ids: expected tokens {num_columns} or more elements apart, "
            f"found a stride of {ids.strides[0]} bytes"
        )
    args.ids, args.ids_stride = ids.pointer, stride
    args.num_tokens, args.num_columns = num_tokens, num_columns
    return args


def to_bf16(call: Call, args: _native.LookupArgs) -> Array:
    """Rows as BF16 [T, C*D]."""
    result = call.result("out", BF16, (args.num_tokens, args.num_columns * args.head_dim))
    args.form, args.out = _native.RowForm.BF16, result.pointer
    _run(call, args)
    return result.array


def to_packed(call: Call, args: _native.LookupArgs) -> Array:
    """Rows as uint8 [T, C*(D+D/32)]."""
    row_bytes = args.num_columns * packed_row_bytes(args.head_dim)
    result = call.result("out", UINT8, (args.num_tokens, row_bytes))
    args.form, args.out = _native.RowForm.PACKED, result.pointer
    _run(call, args)
    return result.array


def mxfp8_outputs(
    op: str, scale_order: ScaleOrder, out: tuple[Array, Array] | None
) -> dict[str, Array]:
    """`out` of a lookup to MXFP8, as the arguments of a Call."""
    if scale_order not in ("linear", "128x4"):
        raise InputError(f"{op}: scale_order: expected linear or 128x4, found {scale_order!r}")
    return output_pair(op, out)


def to_mxfp8(call: Call, args: _native.LookupArgs, scale_order: ScaleOrder) -> tuple[Array, Array]:
    """Values uint8 [T, C*D] and scales uint8."""
    linear = scale_order == "linear"
    num_tokens, row_size = args.num_tokens, args.num_columns * args.head_dim
    num_scales = num_blocks(row_size)
    shape = (num_tokens, num_scales) if linear else (staged_scale_bytes(num_tokens, num_scales),)
    values = call.result("out_values", FP8_BYTES, (num_tokens, row_size))
    scales = call.result("out_scales", E8M0_BYTES, shape)
    args.form = _native.RowForm.MXFP8_LINEAR if linear else _native.RowForm.MXFP8_128X4
    args.out, args.out_scales = values.pointer, scales.pointer
    _run(call, args)
    return values.array, scales.array


def _run(call: Call, args: _native.LookupArgs) -> None:
    num_bytes = 0 if call.device == _native.CPU else _native.lookup_workspace(args)
    with call.scratch(num_bytes) as workspace:
        args.workspace, args.workspace_bytes = workspace, num_bytes
        call.run(args)
