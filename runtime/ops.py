# SPDX-License-Identifier: Apache-2.0
"""The Engram ops, run eagerly on arrays of the CPU or of one GPU.

Arrays may be numpy arrays, torch tensors, or anything else with DLPack or __cuda_array_interface__;
all arrays of a call lie on one device. BF16 is bfloat16 (of ml_dtypes or torch) or its bits as
uint16; FP8 is float8_e4m3fn or uint8; E8M0 is float8_e8m0fnu or uint8; masks are bool or uint8. Any
torch tensor among the arrays makes the results torch tensors; else they are numpy arrays on the CPU
and DeviceArrays on a GPU.

Each op takes `out`, what to write instead of new arrays, and `stream`, an int, a torch stream or a
cuda-python stream (default: torch's current stream for torch tensors, else the legacy default
stream). GPU work is enqueued only: arrays must live until a stream of your own has done it, and it
can be captured into a CUDA graph, with `out` given and, for hash_ids, after one earlier call with
the same layout on that device.

What the CPU refuses at once (ids outside the vocabulary, boundaries that do not rise from 0 to T)
a GPU reports later, as an EngramError of the next op on that device or of raise_device_fault; the
tokens concerned get row ids -1.

Letters in shapes: T tokens, B requests, L layers, N highest n-gram order, C columns, D values per
row (head_dim).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trtllm_engram.plugins.errors import InputError

from . import _native
from .arrays import BF16, BOOL, E8M0, FP8, HIDDEN, INT32, POSITION, UINT8, Array, View
from .call import Call, check_head_dim, integer, number, output_pair
from .lookup_call import (
    E8M0_BYTES,
    FP8_BYTES,
    ScaleOrder,
    mxfp8_outputs,
    take_ids,
    to_bf16,
    to_mxfp8,
    to_packed,
)
from .row import num_blocks, packed_row_bytes, staged_scale_bytes

if TYPE_CHECKING:
    from trtllm_engram.builder.layout import EngramLayout

_HIDDEN_DTYPES = {
    "bfloat16": _native.Dtype.BFLOAT16,
    "uint16": _native.Dtype.BFLOAT16,
    "float16": _native.Dtype.FLOAT16,
    "float32": _native.Dtype.FLOAT32,
}

_WEIGHT_LAYOUTS = {layout.name.lower(): layout for layout in _native.WeightLayout}
_PROJECT_KERNELS = {kernel.name.lower(): kernel for kernel in _native.ProjectKernel}


def hash_ids(
    layout: EngramLayout,
    token_map: Array,
    token_ids: Array,
    positions: Array,
    cu_seqlens: Array | None,
    lookback_ids: Array | None = None,
    lookback_dead: Array | None = None,
    dead_mask: Array | None = None,
    *,
    next_lookback_out: Array | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Any:
    """Row ids int32 [T, L, C] of every token in every layer's table; -1 for padding tokens, -2**31
    for those that need a lost id.

    Args:
        token_map: int32 [vocab] of build_token_map.
        token_ids: int32 [T] raw ids.
        positions: int32 or int64 [T], of each token in its own sequence.
        cu_seqlens: int32 [B+1], first token of each request, then the end; None: a token each.
        lookback_ids: int32 [B, N-1], raw ids before the request's first token, nearest first;
            -1 is unknown, -2**31 lost (see history).
        lookback_dead: bool [B, N-1], lookback tokens that end an n-gram (image spans).
        dead_mask: bool [T], tokens that end an n-gram.
        next_lookback_out: int32 [B, N-1], written with the lookback_ids of the requests' next call.
        out: int32 [T, L, C].
    """
    call = Call(
        "hash_ids",
        stream,
        token_ids=token_ids,
        token_map=token_map,
        positions=positions,
        cu_seqlens=cu_seqlens,
        lookback_ids=lookback_ids,
        lookback_dead=lookback_dead,
        dead_mask=dead_mask,
        next_lookback_out=next_lookback_out,
        out=out,
    )
    num_layers, num_orders, num_heads = layout.primes.shape
    tokens = call.input("token_ids", INT32, (None,))
    (num_tokens,) = tokens.shape
    vocabulary = call.input("token_map", INT32, (None,))
    where = call.input("positions", POSITION, (num_tokens,))
    boundaries = None if cu_seqlens is None else call.input("cu_seqlens", INT32, (None,))
    num_requests = num_tokens if boundaries is None else boundaries.shape[0] - 1
    if num_requests < 0:
        raise InputError("hash_ids: cu_seqlens: expected int32 [B+1], found int32 [0]")
    if lookback_dead is not None and lookback_ids is None:
        raise InputError("hash_ids: lookback_ids: expected with lookback_dead, found None")
    window = (num_requests, num_orders)
    result = call.result("out", INT32, (num_tokens, num_layers, num_orders * num_heads))
    multipliers, primes, offsets = _hash_constants(call, layout)
    call.run(
        _native.HashArgs(
            multipliers=multipliers,
            primes=primes,
            offsets=offsets,
            token_map=vocabulary.pointer,
            token_ids=tokens.pointer,
            positions=where.pointer,
            cu_seqlens=None if boundaries is None else boundaries.pointer,
            lookback_ids=call.optional("lookback_ids", INT32, window),
            lookback_dead=call.optional("lookback_dead", BOOL, window),
            dead_mask=call.optional("dead_mask", BOOL, (num_tokens,)),
            hash_ids=result.pointer,
            next_lookback_ids=call.output("next_lookback_out", INT32, window),
            num_tokens=num_tokens,
            num_requests=num_requests,
            num_layers=num_layers,
            max_ngram_size=num_orders + 1,
            num_heads=num_heads,
            vocab_size=vocabulary.shape[0],
            pad_token_id=layout.config.pad_token_id,
            positions_dtype=_native.Dtype[where.dtype.upper()],
        )
    )
    return result.array


class History(NamedTuple):
    """What hash_ids takes of a call whose history lies in a paged KV cache."""

    positions: Any  # int32 [T]
    cu_seqlens: Any  # int32 [B+1]
    lookback_ids: Any  # int32 [B, N-1]


def history(
    pool: Array,
    block_offsets: Array,
    sequence_lengths: Array,
    context_lengths: Array,
    token_ids: Array,
    *,
    num_contexts: int,
    num_context_tokens: int,
    max_ngram_size: int,
    secondary_pool: Array | None = None,
    cache_indirection: Array | None = None,
    out: History | None = None,
    stream: Any = None,
) -> History:
    """The tokens before a call, from the slots of a reserved layer of TensorRT-LLM's paged KV
    cache; this call's tokens are written into their slots. Context chunks come first.

    Args:
        pool: uint8 [blocks, tokens of a block, bytes of a slot] from the layer's first block on.
        block_offsets: int32 [B, 2, blocks of a request], keys' and values'; bit 31: secondary_pool.
        sequence_lengths: int32 [B], tokens with this call's.
        context_lengths: int32 [B], of a chunk its tokens, of a generation step the prompt's.
        token_ids: int32 [T] raw ids; generation steps have the same number of tokens each.
        secondary_pool: as pool.
        cache_indirection: int32 [prompts, beams, positions]; None: no beams.
        out: arrays for the result.

    Raises:
        InputError: a slot does not hold what was written there (on a GPU: a device fault, and that
            request's lookback_ids are -2**31: lost).
    """
    given = out or History(None, None, None)
    call = Call(
        "history",
        stream,
        token_ids=token_ids,
        pool=pool,
        secondary_pool=secondary_pool,
        block_offsets=block_offsets,
        sequence_lengths=sequence_lengths,
        context_lengths=context_lengths,
        cache_indirection=cache_indirection,
        positions=given.positions,
        cu_seqlens=given.cu_seqlens,
        lookback_ids=given.lookback_ids,
    )
    (num_tokens,) = call.input("token_ids", INT32, (None,)).shape
    blocks = call.input("pool", UINT8, (None, None, None))
    _, tokens_per_block, slot_bytes = blocks.shape
    offsets = call.input("block_offsets", INT32, (None, 2, None))
    num_requests, _, max_blocks = offsets.shape
    beam_width, max_sequence = 1, 0
    if cache_indirection is not None:
        beams = call.input("cache_indirection", INT32, (None, None, None))
        _, beam_width, max_sequence = beams.shape
    window = integer("history: max_ngram_size", max_ngram_size) - 1
    positions = call.result("positions", INT32, (num_tokens,))
    boundaries = call.result("cu_seqlens", INT32, (num_requests + 1,))
    lookback = call.result("lookback_ids", INT32, (num_requests, window))
    call.run(
        _native.HistoryArgs(
            primary_pool=call.output("pool", UINT8, blocks.shape),
            secondary_pool=_secondary_pool(call, blocks) if secondary_pool is not None else None,
            block_offsets=offsets.pointer,
            sequence_lengths=call.input("sequence_lengths", INT32, (num_requests,)).pointer,
            context_lengths=call.input("context_lengths", INT32, (num_requests,)).pointer,
            cache_indirection=call.optional("cache_indirection", INT32, (None, None, None)),
            token_ids=call.input("token_ids", INT32, (num_tokens,)).pointer,
            positions=positions.pointer,
            cu_seqlens=boundaries.pointer,
            lookback_ids=lookback.pointer,
            num_tokens=num_tokens,
            num_requests=num_requests,
            num_contexts=integer("history: num_contexts", num_contexts),
            num_context_tokens=integer("history: num_context_tokens", num_context_tokens),
            max_blocks=max_blocks,
            tokens_per_block=tokens_per_block,
            slot_bytes=slot_bytes,
            beam_width=beam_width,
            max_sequence=max_sequence,
            max_ngram_size=window + 1,
        )
    )
    return History(positions.array, boundaries.array, lookback.array)


def lookup(
    values: Array,
    scales: Array,
    ids: Array,
    first_row: int = 0,
    *,
    out: Array | None = None,
    stream: Any = None,
) -> Any:
    """Rows as BF16 [T, C*D]: FP8 value times scale, rounded once; zeros for ids without a row.

    Args:
        values: FP8 [rows, D].
        scales: E8M0 [rows, D/32].
        ids: int32 [T, C]; tokens may be apart, as in hash_ids(...)[:, layer].
        first_row: row id of values[0]; ids outside [first_row, first_row + rows) read as zeros.
        out: BF16 [T, C*D].
    """
    call = Call("lookup", stream, values=values, scales=scales, ids=ids, out=out)
    return to_bf16(call, _lookup_args(call, first_row))


def lookup_packed(
    values: Array,
    scales: Array,
    ids: Array,
    first_row: int = 0,
    *,
    out: Array | None = None,
    stream: Any = None,
) -> Any:
    """Rows as uint8 [T, C*(D+D/32)]: each row's value bytes, then its scale bytes; see lookup."""
    call = Call("lookup_packed", stream, values=values, scales=scales, ids=ids, out=out)
    return to_packed(call, _lookup_args(call, first_row))


def lookup_mxfp8(
    values: Array,
    scales: Array,
    ids: Array,
    first_row: int = 0,
    *,
    scale_order: ScaleOrder = "linear",
    out: tuple[Array, Array] | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Rows as the operands of a block-scaled GEMM; see lookup.

    Returns:
        Values uint8 [T, C*D], and scales uint8: [T, C*D/32] in linear order, or flat in F8_128x4
        order with zeros past row T (ceil(T/128) * ceil(C*D/128) * 512 bytes).
    """
    outs = mxfp8_outputs("lookup_mxfp8", scale_order, out)
    call = Call("lookup_mxfp8", stream, values=values, scales=scales, ids=ids, **outs)
    return to_mxfp8(call, _lookup_args(call, first_row), scale_order)


def stage_mxfp8(
    packed: Array,
    head_dim: int = 256,
    *,
    out: tuple[Array, Array] | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Packed rows, uint8 [T, C*(D+D/32)], as the operands of a block-scaled GEMM.

    Returns:
        Values uint8 [T, C*D], and scales uint8 in F8_128x4 order with zeros past row T.
    """
    call = Call("stage_mxfp8", stream, packed=packed, **output_pair("stage_mxfp8", out))
    rows = call.input("packed", UINT8, (None, None))
    check_head_dim("stage_mxfp8: head_dim", head_dim)
    num_tokens, packed_bytes = rows.shape
    num_columns, rest = divmod(packed_bytes, packed_row_bytes(head_dim))
    if rest:
        raise InputError(
            f"stage_mxfp8: packed: expected rows of {packed_row_bytes(head_dim)} bytes "
            f"(head_dim {head_dim}), found {packed_bytes} bytes a token"
        )
    row_size = num_columns * head_dim
    row_values = call.result("out_values", FP8_BYTES, (num_tokens, row_size))
    scale_bytes = staged_scale_bytes(num_tokens, num_blocks(row_size))
    row_scales = call.result("out_scales", E8M0_BYTES, (scale_bytes,))
    call.run(
        _native.StageArgs(
            packed=rows.pointer,
            values=row_values.pointer,
            scales=row_scales.pointer,
            num_tokens=num_tokens,
            num_columns=num_columns,
            head_dim=head_dim,
        )
    )
    return row_values.array, row_scales.array


def project(
    x: Array,
    weight: Array,
    scale: Array,
    *,
    weight_layout: str = "row_major",
    kernel: str = "auto",
    out: Array | None = None,
    stream: Any = None,
) -> Any:
    """Keys and value of each token, BF16 [T, out]: x W^T with FP32 sums, rounded once.

    A token's result does not depend on the tokens beside it.

    Args:
        x: BF16 [T, in], the result of lookup.
        weight: FP8 [out, in], out = (hc_mult+1)*hidden.
        scale: E8M0 [ceil(out/32), ceil(in/32)], one per block of 32x32 weights.
        weight_layout: row_major, or sm90_v1, on a GPU of compute capability 9.0, for what
            builder.weight_layout.lay_weight made of the weight.
        kernel: GPU alone: generic, or one of sm90_16 to sm90_wide_256, instead of the fastest
            there is.
        out: BF16 [T, out].
    """
    for name, value, known in (
        ("kernel", kernel, _PROJECT_KERNELS),
        ("weight_layout", weight_layout, _WEIGHT_LAYOUTS),
    ):
        if value not in known:
            raise InputError(
                f"project: {name}: expected one of {', '.join(known)}, found {value!r}"
            )
    call = Call("project", stream, x=x, weight=weight, scale=scale, out=out)
    weights = call.input("weight", FP8, (None, None))
    out_features, in_features = weights.shape
    scales = call.input("scale", E8M0, (num_blocks(out_features), num_blocks(in_features)))
    rows = call.input("x", BF16, (None, in_features))
    num_tokens = rows.shape[0]
    result = call.result("out", BF16, (num_tokens, out_features))
    call.run(
        _native.ProjectArgs(
            x=rows.pointer,
            weight=weights.pointer,
            scale=scales.pointer,
            out=result.pointer,
            num_tokens=num_tokens,
            in_features=in_features,
            out_features=out_features,
            kernel=_PROJECT_KERNELS[kernel],
            weight_layout=_WEIGHT_LAYOUTS[weight_layout],
        )
    )
    return result.array


def gate(
    hidden: Array,
    kv: Array,
    q_weight: Array,
    k_weight: Array,
    eps: float,
    token_mask: Array | None = None,
    *,
    out: Array | None = None,
    stream: Any = None,
) -> Any:
    """The residual stream with each token's gated value added: shape and dtype of hidden.

    Args:
        hidden: BF16, float16 or float32 [T, hc_mult, hidden].
        kv: BF16 [T, (hc_mult+1)*hidden], the result of project.
        q_weight: BF16 [hc_mult, hidden]; k_weight likewise.
        eps: rms_norm_eps.
        token_mask: bool [T], False leaves a token as it is.
        out: like hidden; may be hidden itself.
    """
    call = Call(
        "gate",
        stream,
        hidden=hidden,
        kv=kv,
        q_weight=q_weight,
        k_weight=k_weight,
        token_mask=token_mask,
        out=out,
    )
    residual = call.input("hidden", HIDDEN, (None, None, None))
    num_tokens, hc_mult, hidden_size = residual.shape
    keys_and_value = call.input("kv", BF16, (num_tokens, (hc_mult + 1) * hidden_size))
    queries = call.input("q_weight", BF16, (hc_mult, hidden_size))
    keys = call.input("k_weight", BF16, (hc_mult, hidden_size))
    mask = call.optional("token_mask", BOOL, (num_tokens,))
    out_dtypes = BF16 if residual.dtype in BF16 else (residual.dtype,)
    result = call.result("out", out_dtypes, residual.shape)
    call.run(
        _native.GateArgs(
            hidden=residual.pointer,
            kv=keys_and_value.pointer,
            q_weight=queries.pointer,
            k_weight=keys.pointer,
            token_mask=mask,
            out=result.pointer,
            num_tokens=num_tokens,
            hc_mult=hc_mult,
            hidden_size=hidden_size,
            dtype=_HIDDEN_DTYPES[residual.dtype],
            eps=number("gate: eps", eps),
        )
    )
    return result.array


def raise_device_fault(device: int = 0) -> None:
    """Raises EngramError, once, if a kernel of an earlier call on this GPU met bad input.

    A kernel that still runs may report later: synchronise first to be sure.
    """
    _native.device_fault(device)


def _secondary_pool(call: Call, blocks: View) -> int | None:
    shape = call.input("secondary_pool", UINT8, (None, *blocks.shape[1:])).shape
    return call.output("secondary_pool", UINT8, shape)


def _hash_constants(call: Call, layout: EngramLayout) -> tuple[int, int, int]:
    """Pointers to multipliers, primes and offsets on the call's device."""
    multipliers, primes, offsets = layout.multipliers, layout.primes, layout.offsets
    if call.device == _native.CPU:
        return multipliers.ctypes.data, primes.ctypes.data, offsets.ctypes.data
    start = call.constant(np.concatenate([multipliers.ravel(), primes.ravel(), offsets.ravel()]))
    first_prime = start + multipliers.nbytes
    return start, first_prime, first_prime + primes.nbytes


def _lookup_args(call: Call, first_row: int) -> _native.LookupArgs:
    values = call.input("values", FP8, (None, None))
    num_rows, head_dim = values.shape
    check_head_dim(f"{call.op}: values: last axis", head_dim)
    scales = call.input("scales", E8M0, (num_rows, num_blocks(head_dim)))
    args = _native.LookupArgs(
        values=values.pointer,
        scales=scales.pointer,
        first_row=integer(f"{call.op}: first_row", first_row),
        num_rows=num_rows,
        head_dim=head_dim,
    )
    return take_ids(call, args)
