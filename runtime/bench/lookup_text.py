# SPDX-License-Identifier: Apache-2.0
"""Rows of a table in host memory that texts read, the most read of other texts kept by the GPU.

Token ids are those of the usual tokenizer, row ids the hash's, in a table that the formula fills as
in lookup_host. Each turn reads the text's next piece, as a server would. The hot rows are counted
in texts that are not measured; beside ours stands the same lookup without them, and the rival,
which has none. What is timed has no adaptive part, which would have pieces that come again; what it
answers is counted by looking up each piece once.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder import EngramLayout
from trtllm_engram.builder.made_up import config_of_size
from trtllm_engram.builder.synthesize import default_tokenizer
from trtllm_engram.builder.token_map import load_token_map
from trtllm_engram.plugins.errors import InputError

from .. import _native, ops, row_counts
from ..row import packed_row_bytes
from ..tables import Tables
from ..text import encode, encode_all, read_text
from .gpu import OURS, Case, Target, load_torch
from .lookup import COLUMNS, HEAD_DIM
from .lookup_host import (
    AUTO,
    CHECKED_TOKENS,
    LAYER,
    NAME,
    SEED,
    HostTable,
    bf16_check,
    bound_table,
    look_up,
    measure_rates,
    tensor_at,
)
from .made_up_rows import made_up_rows
from .rivals import VLLM, Rivals

_GIB = 1 << 30
_MAX_PIECES = 64
_COLD = "no hot rows"


@dataclass(frozen=True)
class Texts:
    """What is looked up, and what is kept: files, and GiB of GPU memory."""

    measured: Sequence[Path]
    counted: Sequence[Path]
    hot_gib: float
    hot_adaptive: float


def cases(
    tokens: Sequence[int], table_gb: float, rivals: Rivals | None, texts: Texts
) -> Iterator[Case]:
    config = config_of_size(int(table_gb * 1e9), layers=(LAYER,))
    layout = EngramLayout(config)
    hashed = Hashed(layout)
    measured = {path: hashed.tokens_of(path, max(tokens)) for path in texts.measured}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="trtllm-engram-bench-"))
        options: dict[str, Any] = {}
        if texts.counted:
            hot_rows = Path(folder, "hot.npy")
            np.save(hot_rows, hashed.hot_rows(texts.counted, texts.hot_gib))
            options = {
                "hot_rows": hot_rows,
                "hot_gib": texts.hot_gib,
                "hot_adaptive": texts.hot_adaptive,
            }
        tables = stack.enter_context(bound_table(table_gb, **options))
        table = HostTable(bool(rivals))
        rates = measure_rates(table.values)
        for path, text in measured.items():
            for count in tokens:
                pieces = [hashed.ids(piece) for piece in _pieces(text, count)]
                ids = pieces[0]
                expected = made_up_rows(config, LAYER, ids[:CHECKED_TOKENS], SEED)
                case = _case(f"text {path.stem}", pieces, table, rivals, expected)
                static, _ = _hot_shares(tables, [ids])
                facts, note = {**case.facts, "hot_share": static}, f"{static:.0%} hot"
                if texts.hot_adaptive:
                    _, adaptive = _hot_shares(tables, pieces)
                    facts["adaptive_share"], note = adaptive, f"{note}, {adaptive:.0%} adaptive"
                yield replace(case, read_rates=rates, facts=facts, note=note)


def _pieces(text: npt.NDArray[np.int32], num_tokens: int) -> Iterator[npt.NDArray[np.int32]]:
    for index in range(min(text.size // num_tokens, _MAX_PIECES)):
        yield text[index * num_tokens :][:num_tokens]


class Hashed:
    """Texts as token ids and row ids of a made-up layout."""

    def __init__(self, layout: EngramLayout) -> None:
        self._layout = layout
        self._tokenizer = default_tokenizer()
        self._token_map = load_token_map(self._tokenizer)

    def tokens_of(self, path: Path, least: int = 0) -> npt.NDArray[np.int32]:
        text = encode(self._tokenizer, read_text(str(path)))
        if text.size < least:
            raise InputError(f"{path}: expected at least {least} tokens, found {text.size}")
        return text

    def ids(self, text: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """int32 [T, C] of the layer."""
        positions = np.arange(text.size, dtype=np.int64)
        ends = np.array([0, text.size], np.int32)
        ids: npt.NDArray[np.int32] = ops.hash_ids(
            self._layout, self._token_map, text, positions, ends
        )
        return np.ascontiguousarray(ids[:, 0])

    def hot_rows(self, paths: Sequence[Path], gib: float) -> npt.NDArray[np.void]:
        texts = encode_all(self._tokenizer, [read_text(str(path)) for path in paths])
        counted = row_counts.count_rows(self._layout, self._token_map, texts)
        return row_counts.to_array(self._layout, counted, [int(gib * _GIB)])


def _case(
    row: str,
    pieces: Sequence[npt.NDArray[np.int32]],
    table: HostTable,
    rivals: Rivals | None,
    expected: Any,
) -> Case:
    """Of the first piece to begin with, then of each in turn."""
    torch = load_torch()
    put_pieces = [torch.tensor(ids, device="cuda") for ids in pieces]
    put = put_pieces[0].clone()
    num_tokens = len(put)
    first, others = (
        torch.zeros((num_tokens, COLUMNS * HEAD_DIM), dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )
    contenders = {OURS: look_up(put, first, AUTO), _COLD: look_up(put, others, AUTO, hot=False)}
    if rivals:
        contenders[VLLM] = rivals.vllm_lookup(table.values, table.host_scales, put, others)
    row = f"host lookup to BF16, {row}"
    check = bf16_check(row, expected, first, others)
    targets = [Target(VLLM, ratio=1 / 6)] if num_tokens == 8192 else []

    def refresh(turn: int) -> None:
        put.copy_(put_pieces[turn % len(put_pieces)])

    return Case(
        row,
        num_tokens,
        put.numel() * packed_row_bytes(HEAD_DIM),
        contenders,
        check,
        targets,
        facts={"pieces": len(pieces)},
        refresh=refresh,
    )


def _hot_shares(tables: Tables, pieces: Sequence[npt.NDArray[np.int32]]) -> tuple[float, float]:
    """Of the rows that lookups read one after the other, those in the static part and in the
    adaptive one, which is empty at first."""
    rows = _native.table_view(NAME, load_torch().cuda.current_device()).hot.adaptive
    if rows.num_buckets > 0:
        tensor_at(rows.slots, (rows.num_buckets, 4 * 8)).fill_(0xFF)

    def counted() -> npt.NDArray[np.int64]:
        hot = tables.describe()[NAME]["hot"] or {}
        keys = ("asked", "found", "adaptive_found")
        return np.array([sum(hot.get(key, {}).values()) for key in keys])

    before = counted()
    for ids in pieces:
        tables.lookup(NAME, load_torch().tensor(ids, device="cuda"))
    load_torch().cuda.synchronize()
    asked, static, adaptive = (counted() - before).tolist()
    return static / max(asked, 1), adaptive / max(asked, 1)
