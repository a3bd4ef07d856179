# SPDX-License-Identifier: Apache-2.0
"""A request of the python form as pieces, and what is made of them as its response."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.model import hidden_name, hidden_out_name, rows_name
from trtllm_engram.plugins.errors import InputError

from ..pieces import Made, Piece
from ..session import as_token_ids
from .tensors import to_array

Host = npt.NDArray[Any]
Encode = Callable[[bytes], npt.NDArray[np.int32]]


@dataclass(frozen=True)
class Past:
    """A text up to here: its next position and the lookback from there."""

    position: int
    lookback_ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Request:
    """What a request asks for: a piece for each row of its batch."""

    pieces: list[Piece]
    outputs: frozenset[str]

    @property
    def needs_rows(self) -> bool:
        return any(name.endswith(".rows") for name in self.outputs)


class Reader:
    """Reads requests for one model.

    Args:
        vocab_size: token ids are below it.
        encode: token ids of a text.
        check_size: raises InputError for a piece of too many tokens.
    """

    def __init__(
        self,
        config: EngramConfig,
        vocab_size: int,
        encode: Encode,
        check_size: Callable[[int], None],
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._encode = encode
        self._check_size = check_size

    def read(
        self, tensors: Mapping[str, Any], outputs: frozenset[str], past: Past | None
    ) -> Request:
        """tensors: the backend's, by name. past: of the request's sequence; else the request brings
        its own."""
        ids = self._token_ids(tensors)
        for row in ids:
            self._check_size(row.size)
        hidden = self._hidden(tensors, ids)
        if not hidden:
            wanting = sorted(name for name in outputs if name.endswith(".hidden_out"))
            if wanting:
                raise InputError(
                    f"{wanting[0]}: expected {wanting[0].removesuffix('_out')} in the request, "
                    "found none; a request that names no outputs asks for all"
                )
        pasts = [past] * len(ids) if past is not None else self._pasts(tensors, len(ids))
        pieces = [
            Piece(
                row,
                pasts[place].position,
                pasts[place].lookback_ids,
                {layer_id: states[place] for layer_id, states in hidden.items()},
            )
            for place, row in enumerate(ids)
        ]
        return Request(pieces, outputs)

    def new_text(self) -> Past:
        return Past(0, np.full(self._config.max_ngram_size - 1, -1, np.int32))

    def _token_ids(self, tensors: Mapping[str, Any]) -> Sequence[npt.NDArray[np.int32]]:
        if ("text" in tensors) == ("token_ids" in tensors):
            found = "both" if "text" in tensors else "neither"
            raise InputError(f"expected text or token_ids, found {found}")
        if "text" in tensors:
            texts = tensors["text"].as_numpy()
            if texts.size != 1:
                raise InputError(
                    f"text: expected one in a request, found {texts.size}; "
                    "rows of a batch are token_ids of one length"
                )
            return [self._encode(texts.reshape(-1)[0])]
        return [as_token_ids(row, self._vocab_size) for row in to_array(tensors["token_ids"])]

    def _hidden(self, tensors: Mapping[str, Any], ids: Sequence[Host]) -> dict[int, Host]:
        names = {layer_id: hidden_name(layer_id) for layer_id in self._config.layer_ids}
        given = [name for name in names.values() if name in tensors]
        if not given:
            return {}
        if len(given) < len(names):
            raise InputError(
                f"expected {', '.join(names.values())} or none of them, found {', '.join(given)}"
            )
        hidden = {layer_id: to_array(tensors[name]) for layer_id, name in names.items()}
        for layer_id, states in hidden.items():
            if states.shape[:2] != (len(ids), ids[0].size):
                raise InputError(
                    f"{names[layer_id]}: expected {ids[0].size} tokens in {len(ids)} rows, found "
                    f"{list(states.shape[:2][::-1])}"
                )
        return hidden

    def _pasts(self, tensors: Mapping[str, Any], num_rows: int) -> list[Past]:
        lookback, position = self.new_text().lookback_ids, np.zeros(1, np.int64)
        lookbacks = np.tile(lookback, (num_rows, 1))
        positions = np.tile(position, (num_rows, 1))
        if "lookback_ids" in tensors:
            lookbacks = to_array(tensors["lookback_ids"])
        if "position" in tensors:
            positions = to_array(tensors["position"])
        for name, array, high in (
            ("lookback_ids", lookbacks, self._vocab_size - 1),
            ("position", positions, 2**31 - 1),
        ):
            low = -1 if name == "lookback_ids" else 0
            if len(array) != num_rows:
                raise InputError(f"{name}: expected {num_rows} rows, found {len(array)}")
            if not low <= int(array.min()) <= int(array.max()) <= high:
                raise InputError(
                    f"{name}: expected {low} to {high}, found {array.min()} to {array.max()}"
                )
        before_text = np.arange(lookbacks.shape[1]) >= positions
        if np.any(before_text & (lookbacks >= 0)):
            row, column = np.argwhere(before_text & (lookbacks >= 0))[0]
            raise InputError(
                f"lookback_ids: expected -1 before the text, whose position is {positions[row, 0]} "
                f"here, found {lookbacks[row, column]}"
            )
        return [
            Past(int(positions[row, 0]), np.ascontiguousarray(lookbacks[row]))
            for row in range(num_rows)
        ]


def outputs_of(request: Request, made: Sequence[Made]) -> dict[str, Host]:
    """The outputs that a request asks for, [B, ...]."""
    found: dict[str, list[Host]] = {
        "hash_ids": [one.hash_ids for one in made],
        "next_lookback_ids": [piece.next_lookback_ids for piece in request.pieces],
    }
    for layer_id in made[0].rows:
        found[rows_name(layer_id)] = [one.rows[layer_id] for one in made]
    for layer_id in made[0].hidden:
        found[hidden_out_name(layer_id)] = [one.hidden[layer_id] for one in made]
    return {name: np.stack(arrays) for name, arrays in found.items() if name in request.outputs}
