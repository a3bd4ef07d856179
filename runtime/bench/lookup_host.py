# SPDX-License-Identifier: Apache-2.0
"""Rows of a table in host memory, read over PCIe: uniform random ids of each hash column.

The table is filled by the formula of `synthesize`, so that rows are known without it; ours has its
scales in GPU memory, the rival reads values and scales in host memory, as it does in its engine.
Each replay reads other rows: of few tokens' the GPU would else still know the pages.
Ceilings are the copy engine's rate and that of a kernel which reads host memory from end to end.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trtllm_engram.builder import EngramLayout
from trtllm_engram.builder.made_up import config_of_size

from .. import _native
from ..call import Call
from ..lookup_call import take_ids, to_bf16, to_mxfp8, to_packed
from ..row import num_blocks, packed_row_bytes
from ..tables import Tables
from .gpu import OURS, Case, Target, event_us, expect, load_torch
from .lookup import COLUMNS, HEAD_DIM, empty_operands, empty_packed, same_operands
from .made_up_rows import made_up_rows, uniform_ids
from .rivals import VLLM, Rivals
from .tables import made_up_store

NAME = "bench"
LAYER = 1
SEED = 0
CHECKED_TOKENS = 64
_CEILING_BYTES = 1 << 30
_EXPLAINED_BLOCKS = (1, 4, 8, 16, 132)
_GATHERED_BLOCKS = (3, 8, 16, 32, 64)

Path = tuple[_native.LookupPath, int]  # and the blocks that read, 0 for the default
AUTO: Path = (_native.LookupPath.AUTO, 0)
_DIRECT: Path = (_native.LookupPath.DIRECT, 0)


def cases(
    tokens: Sequence[int], table_gb: float, rivals: Rivals | None, explain: bool
) -> Iterator[Case]:
    """explain: every path beside the one that is chosen."""
    torch = load_torch()
    torch.manual_seed(0)
    config = config_of_size(int(table_gb * 1e9), layers=(LAYER,))
    layout = EngramLayout(config)
    with bound_table(table_gb):
        table = HostTable(bool(rivals))
        rates = measure_rates(table.values)
        for count in tokens:
            ids = uniform_ids(layout, count, np.random.default_rng(count))
            expected = made_up_rows(config, LAYER, ids[:CHECKED_TOKENS], SEED)
            put = torch.tensor(ids, device="cuda")
            refresh = _fresh_ids(layout, put)
            for case in _of_ids(put, table, rivals, explain, expected):
                put.copy_(torch.from_numpy(ids))
                yield replace(case, read_rates=rates, refresh=refresh)


def _fresh_ids(layout: EngramLayout, ids: Any) -> Callable[[int], None]:
    """Overwrites ids [T, C] by as uniform ones, each of its column's rows, on torch's stream."""
    torch = load_torch()
    columns = (layout.primes[0].ravel(), layout.offsets[0])
    sizes, offsets = (torch.tensor(each, dtype=torch.int64, device="cuda") for each in columns)

    def refresh(_turn: int) -> None:
        rows = torch.rand(ids.shape, dtype=torch.float64, device="cuda").mul_(sizes)
        ids.copy_(rows.to(torch.int64).add_(offsets))

    return refresh


@contextlib.contextmanager
def bound_table(table_gb: float, **options: Any) -> Iterator[Tables]:
    """NAME, a table of so many GB filled by the formula, with its scales in GPU memory."""
    with made_up_store(int(table_gb * 1e9)) as store, Tables() as tables:
        tables.bind(NAME, store, layer=LAYER, scales="device", formula_seed=SEED, **options)
        yield tables


class HostTable:
    """What the contenders read of the bound table: values in host memory, scales on both sides."""

    def __init__(self, with_rivals: bool) -> None:
        torch = load_torch()
        view = _native.table_view(NAME, torch.cuda.current_device())
        rows = view.num_rows
        self.values = tensor_at(view.values, (rows, HEAD_DIM))
        self.has_threads = bool(view.lanes)  # that gather
        self.host_scales = None
        if with_rivals:
            scales = tensor_at(view.scales, (rows, num_blocks(HEAD_DIM)))
            self._pinned = torch.empty(scales.shape, dtype=torch.uint8, pin_memory=True)
            self._pinned.copy_(scales)
            self.host_scales = tensor_at(self._pinned.data_ptr(), tuple(scales.shape))


def _of_ids(
    ids: Any, table: HostTable, rivals: Rivals | None, explain: bool, expected: Any
) -> Iterator[Case]:
    yield _to_bf16(ids, table, rivals, explain, expected)
    if not explain:
        yield _packed(ids)
        yield _to_mxfp8(ids)


def _to_bf16(
    ids: Any, table: HostTable, rivals: Rivals | None, explain: bool, expected: Any
) -> Case:
    torch = load_torch()
    num_tokens = ids.shape[0]

    def empty() -> Any:
        shape = (num_tokens, COLUMNS * HEAD_DIM)
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    first, others = empty(), empty().zero_()
    contenders: dict[str, Callable[[], Any]] = {OURS: look_up(ids, first, AUTO)}
    if rivals:
        contenders[VLLM] = rivals.vllm_lookup(table.values, table.host_scales, ids, others)
    if explain:
        contenders["direct"] = look_up(ids, others, _DIRECT)
        for blocks in _EXPLAINED_BLOCKS:
            path = (_native.LookupPath.SORTED, blocks)
            contenders[f"sorted, {blocks}"] = look_up(ids, others, path)
        for blocks in _GATHERED_BLOCKS if table.has_threads else ():
            path = (_native.LookupPath.GATHERED, blocks)
            contenders[f"gathered, {blocks}"] = look_up(ids, others, path)
    row = "host lookup to BF16"
    check = bf16_check(row, expected, first, others)
    num_bytes = ids.numel() * packed_row_bytes(HEAD_DIM)
    return Case(row, num_tokens, num_bytes, contenders, check, _targets(num_tokens))


def bf16_check(row: str, expected: Any, first: Any, others: Any) -> Callable[[str, Any], None]:
    """Holds each contender's rows against the expected ones of the first tokens and the first
    contender's, and clears what the others share, so that each writes it all."""
    torch = load_torch()

    def check(name: str, rows: Any) -> None:
        few = rows[: len(expected)].view(torch.int16).cpu().numpy()
        right = np.array_equal(few, expected.view(np.int16))
        same = torch.equal(rows.view(torch.int16), first.view(torch.int16))
        others.zero_()
        expect(right and same, row, len(first), name)

    return check


def _packed(ids: Any) -> Case:
    num_tokens = ids.shape[0]
    row = "host lookup packed"

    outs = [empty_packed(num_tokens) for _ in range(2)]

    def look_up(path: Path, out: Any) -> Any:
        call = Call("lookup_packed", None, ids=ids, out=out)
        return to_packed(call, _args(call, path))

    def check(name: str, packed: Any) -> None:
        same = load_torch().equal(packed, look_up(_DIRECT, outs[1]))
        expect(same, row, num_tokens, name)

    num_bytes = ids.numel() * packed_row_bytes(HEAD_DIM)
    return Case(row, num_tokens, num_bytes, {OURS: lambda: look_up(AUTO, outs[0])}, check)


def _to_mxfp8(ids: Any) -> Case:
    num_tokens = ids.shape[0]
    row = "host lookup to MXFP8"

    def look_up(path: Path, out: Any) -> Any:
        call = Call("lookup_mxfp8", None, ids=ids, out_values=out[0], out_scales=out[1])
        return to_mxfp8(call, _args(call, path), "128x4")

    outs = [empty_operands(num_tokens) for _ in range(2)]

    def check(name: str, operands: Any) -> None:
        same = same_operands(operands, look_up(_DIRECT, outs[1]))
        expect(same, row, num_tokens, name)

    num_bytes = ids.numel() * packed_row_bytes(HEAD_DIM)
    return Case(row, num_tokens, num_bytes, {OURS: lambda: look_up(AUTO, outs[0])}, check)


def look_up(ids: Any, out: Any, path: Path, hot: bool = True) -> Callable[[], Any]:
    """hot: with the static hot rows that the table has."""

    def run() -> Any:
        call = Call("lookup", None, ids=ids, out=out)
        args = _args(call, path)
        args.hot.adaptive = _native.AdaptiveRows()
        if not hot:
            args.hot = _native.HotRows()
        return to_bf16(call, args)

    return run


def _args(call: Call, path: Path) -> _native.LookupArgs:
    args = take_ids(call, _native.table_view(NAME, call.device))
    args.path, args.num_read_blocks = path
    return args


def _targets(num_tokens: int) -> list[Target]:
    if num_tokens <= 8:
        return [Target(VLLM, ratio=1.0)]
    if 16 <= num_tokens <= 256:
        return [Target(VLLM, ratio=0.5)]
    return [Target(VLLM, ratio=1 / 3)] if num_tokens >= 4096 else []


def tensor_at(address: int, shape: tuple[int, int]) -> Any:
    """What the GPU reads at an address, as a torch tensor of bytes."""

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    return load_torch().as_tensor(Memory(), device="cuda")


def measure_rates(values: Any) -> dict[str, float]:
    """Bytes a second from host memory: by the copy engine, and read by a kernel in order."""
    torch = load_torch()
    num_bytes = min(_CEILING_BYTES, math.prod(values.shape) // 8 * 8)
    source = values.view(-1)[:num_bytes].view(torch.int64)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    total = torch.empty((), dtype=torch.int64, device="cuda")
    works: dict[str, Callable[[], Any]] = {
        "copy engine": lambda: target.copy_(pinned, non_blocking=True),
        "reads in order": lambda: torch.sum(source, dim=0, out=total),
    }
    return {name: num_bytes / event_us(work) * 1e6 for name, work in works.items()}
