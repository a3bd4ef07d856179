# SPDX-License-Identifier: Apache-2.0
"""Pieces of many requests, run side by side, for servers: each piece brings its own past.

    executor = Executor(EngramSession(store, "cpu", tables))
    made = executor.run([Piece(token_ids, position, lookback_ids, hidden), ...])

A piece's rows and residual streams are those of `run` over its whole text, whatever it is packed
with and wherever the text was cut.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.layers import table_name
from trtllm_engram.builder.model import hidden_name, hidden_out_name
from trtllm_engram.plugins.errors import InputError

from .engine_session import EngineSession
from .metrics import Metrics
from .session import EngramSession, Step

Host = npt.NDArray[Any]


@dataclass(frozen=True)
class Piece:
    """Some tokens of a request, in a row."""

    token_ids: npt.NDArray[np.int32]  # [T]
    position: int  # of the first of them in its text
    lookback_ids: npt.NDArray[np.int32]  # [N-1], the tokens before it, nearest first; -1: unknown
    hidden: Mapping[int, Host]  # by layer id [T, hc_mult, hidden]; empty: none is to be made

    @property
    def next_lookback_ids(self) -> npt.NDArray[np.int32]:
        """The lookback of the piece after this one."""
        window = self.lookback_ids.size
        return np.concatenate([self.token_ids[::-1], self.lookback_ids])[:window]


@dataclass(frozen=True)
class Made:
    """What became of a piece, or of several side by side."""

    hash_ids: npt.NDArray[np.int32]  # [T, L, C]
    rows: Mapping[int, Host]  # by layer id BF16 [T, C*D]; empty: not asked for
    hidden: Mapping[int, Host]  # by layer id, of the dtype that came; empty: none came

    def cut(self, start: int, stop: int) -> Made:
        """Tokens start..stop."""
        rows = {layer_id: array[start:stop] for layer_id, array in self.rows.items()}
        hidden = {layer_id: array[start:stop] for layer_id, array in self.hidden.items()}
        return Made(self.hash_ids[start:stop], rows, hidden)


@dataclass(frozen=True)
class _Pack:
    """Pieces side by side, as ops and engines take them."""

    token_ids: npt.NDArray[np.int32]  # [T]
    positions: npt.NDArray[np.int64]  # [T]
    cu_seqlens: npt.NDArray[np.int32]  # [B+1]
    lookback_ids: npt.NDArray[np.int32]  # [B, N-1]
    hidden: dict[int, Host]


class Executor:
    """Runs pieces with eager ops, at most max_tokens tokens and max_pieces pieces at a time.
    Counts its lookups in `metrics`."""

    def __init__(
        self,
        session: EngramSession,
        max_tokens: int = 8192,
        max_pieces: int = 1024,
        metrics: Metrics | None = None,
    ) -> None:
        self.session = session
        self.metrics = metrics or Metrics()
        self.max_tokens = max_tokens
        self.max_pieces = max_pieces

    def run(self, pieces: Sequence[Piece], *, with_rows: bool = False) -> list[Made]:
        """What becomes of each piece. Each has at most max_tokens tokens, each below the
        vocabulary's size; all bring hidden states, of one dtype, or none does.

        with_rows: give out the looked-up rows too.
        """
        made = []
        for part in self._parts(pieces):
            pack = _pack(part)
            result = self._run(pack, with_rows)
            bounds = pack.cu_seqlens.tolist()
            made += [result.cut(start, stop) for start, stop in pairwise(bounds)]
        return made

    def check_size(self, num_tokens: int) -> None:
        """InputError for a piece of more tokens than there may be."""
        if num_tokens > self.max_tokens:
            raise InputError(
                f"tokens: expected at most {self.max_tokens} in a request, found {num_tokens}"
            )

    def _parts(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        part: list[Piece] = []
        num_tokens = 0
        for piece in pieces:
            self.check_size(piece.token_ids.size)
            num_tokens += piece.token_ids.size
            if part and (num_tokens > self.max_tokens or len(part) == self.max_pieces):
                yield part
                part, num_tokens = [], piece.token_ids.size
            part.append(piece)
        if part:
            yield part

    def _run(self, pack: _Pack, with_rows: bool) -> Made:
        session, step = self.session, self._step(pack)
        hash_ids = session.to_host(step.hash_ids)
        rows, hidden = {}, {}
        for layer_id in session.config.layer_ids if with_rows or pack.hidden else ():
            started = time.perf_counter()
            found = session.rows(layer_id, step)
            self._count(layer_id, hash_ids, time.perf_counter() - started)
            if with_rows:
                rows[layer_id] = session.to_host(found)
            if pack.hidden:
                given = session.to_device(pack.hidden[layer_id])
                kv = session.project(layer_id, found)
                hidden[layer_id] = session.to_host(session.gate(layer_id, given, kv))
        return Made(hash_ids, rows, hidden)

    def _count(self, layer_id: int, hash_ids: Host, seconds: float | None) -> None:
        index = self.session.config.layer_ids.index(layer_id)
        self.metrics.count_lookup(table_name(layer_id), hash_ids[:, index], seconds)

    def _step(self, pack: _Pack) -> Step:
        return self.session.hash(pack.token_ids, pack.positions, pack.cu_seqlens, pack.lookback_ids)


class EngineExecutor(Executor):
    """Runs pieces with an engine of builder.engine.build; row ids and rows come from eager ops.

    session is on the engine's GPU, with the tables that the engine is bound to.
    """

    def __init__(
        self, session: EngramSession, engine: EngineSession, metrics: Metrics | None = None
    ) -> None:
        inputs = engine.engine.inputs
        if "lookback_ids" not in inputs:
            raise InputError(
                "engine: expected an input lookback_ids, as of `build --history explicit`, found "
                f"{', '.join(inputs)}"
            )
        last = engine.engine.num_profiles - 1
        (max_tokens,) = engine.engine.shape_range("token_ids", last)[1]
        max_pieces = engine.engine.shape_range("cu_seqlens", last)[1][0] - 1
        super().__init__(session, max_tokens, max_pieces, metrics)
        self._engine = engine

    def _run(self, pack: _Pack, with_rows: bool) -> Made:
        made = super()._run(replace(pack, hidden={}), with_rows)
        if not pack.hidden:
            return made
        inputs: dict[str, Host] = {
            "token_ids": pack.token_ids,
            "positions": pack.positions,
            "cu_seqlens": pack.cu_seqlens,
            "lookback_ids": pack.lookback_ids,
        }
        inputs |= {hidden_name(layer_id): array for layer_id, array in pack.hidden.items()}
        outputs = self._engine.call(inputs)
        for layer_id in pack.hidden:
            self._count(layer_id, made.hash_ids, None)
        hidden = {layer_id: outputs[hidden_out_name(layer_id)] for layer_id in pack.hidden}
        return replace(made, hidden=hidden)


def _pack(pieces: Sequence[Piece]) -> _Pack:
    sizes = [piece.token_ids.size for piece in pieces]
    return _Pack(
        np.concatenate([piece.token_ids for piece in pieces]),
        np.concatenate([piece.position + np.arange(piece.token_ids.size) for piece in pieces]),
        np.cumsum([0, *sizes], dtype=np.int32),
        np.stack([piece.lookback_ids for piece in pieces]),
        {
            layer_id: np.concatenate([piece.hidden[layer_id] for piece in pieces])
            for layer_id in pieces[0].hidden
        },
    )
