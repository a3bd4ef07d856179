# SPDX-License-Identifier: Apache-2.0
"""A text through an engine of builder.engine.build, chunk by chunk: `run --engine`'s work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.model import hidden_name, hidden_out_name, rows_name
from trtllm_engram.plugins.errors import InputError

from . import ops
from .engine import Engine, Execution
from .hidden import HiddenSource
from .session import DEFAULT_CHUNK, Chunk, as_token_ids
from .store import Store

Host = npt.NDArray[Any]


class EngineSession:
    """Like EngramSession.run, with an engine. Its tables must be bound when it runs.

    The engine's next_lookback_ids carry each chunk's past to the next. Chunks hold the rows where
    the engine gives them out (builder.model's check_outputs); row ids are the CPU's where it has
    none.
    """

    def __init__(self, engine: Engine, store: Store) -> None:
        self.engine = engine
        self.store = store
        self.device = f"cuda:{engine.device}"
        self._layer_ids = store.config.layer_ids
        self._executions: dict[int, Execution] = {}
        check_engine(engine, store)

    @property
    def has_rows(self) -> bool:
        return all(rows_name(layer_id) in self.engine.outputs for layer_id in self._layer_ids)

    @property
    def hidden_dtype(self) -> str:
        """Of the residual streams."""
        return self.engine.inputs[hidden_name(self._layer_ids[0])].dtype

    @property
    def max_tokens(self) -> int:
        """The most tokens of a call that any profile takes."""
        profiles = range(self.engine.num_profiles)
        return max(self.engine.shape_range("token_ids", profile)[1][0] for profile in profiles)

    def run(
        self,
        token_ids: npt.NDArray[np.int32],
        hidden: HiddenSource,
        chunk: int = DEFAULT_CHUNK,
        dead: npt.NDArray[np.bool_] | None = None,
    ) -> Iterator[Chunk]:
        """One text through every layer, `chunk` tokens at a time or as many as the engine takes;
        none of them may be dead."""
        if dead is not None and dead.any():
            raise InputError("dead: expected no dead tokens, as engines of build take none")
        if chunk < 1:
            raise InputError(f"chunk: expected at least 1 token, found {chunk}")
        chunk = min(chunk, self.max_tokens)
        explicit = "lookback_ids" in self.engine.inputs
        if not explicit and token_ids.size > chunk:
            raise InputError(
                f"chunk: expected all {token_ids.size} tokens, as this engine takes no lookback, "
                f"found {chunk} (it takes at most {self.max_tokens})"
            )
        self._check_dtype(hidden)
        token_ids = as_token_ids(token_ids, self.store.token_map.size)
        lookback = np.full((1, self.store.config.max_ngram_size - 1), -1, np.int32)
        for start in range(0, token_ids.size, chunk):
            stop = min(start + chunk, token_ids.size)
            inputs: dict[str, Host] = {
                "token_ids": token_ids[start:stop],
                "positions": np.arange(start, stop, dtype=np.int64),
                "cu_seqlens": np.array([0, stop - start], np.int32),
            }
            if explicit:
                inputs["lookback_ids"] = lookback
            for layer_id in self._layer_ids:
                inputs[hidden_name(layer_id)] = hidden(layer_id, start, stop)
            outputs = self.call(inputs)
            yield self._chunk(start, stop, inputs, outputs)
            lookback = outputs.get("next_lookback_ids", lookback)

    def _check_dtype(self, hidden: HiddenSource) -> None:
        for layer_id in self._layer_ids:
            name = hidden_name(layer_id)
            expected, found = self.engine.inputs[name].dtype, hidden(layer_id, 0, 0).dtype.name
            if found != expected:
                raise InputError(f"{name}: expected {expected}, as the engine takes, found {found}")

    def call(self, inputs: dict[str, Host]) -> dict[str, Host]:
        """The engine's outputs by name, by the first profile that takes these inputs."""
        outputs: dict[str, Host] = self._execution(inputs).run(inputs)
        return outputs

    def _execution(self, inputs: dict[str, Host]) -> Execution:
        profile = self.engine.find_profile({name: array.shape for name, array in inputs.items()})
        if profile not in self._executions:
            self._executions[profile] = self.engine.execution(profile)
        return self._executions[profile]

    def _chunk(
        self, start: int, stop: int, inputs: dict[str, Host], outputs: dict[str, Host]
    ) -> Chunk:
        ids = outputs.get("hash_ids")
        if ids is None:
            ids = ops.hash_ids(
                self.store.layout,
                self.store.token_map,
                inputs["token_ids"],
                inputs["positions"],
                inputs["cu_seqlens"],
                lookback_ids=inputs.get("lookback_ids"),
            )
        rows, hidden = {}, {}
        for layer_id in self._layer_ids:
            if rows_name(layer_id) in outputs:
                rows[layer_id] = outputs[rows_name(layer_id)]
            hidden[layer_id] = outputs[hidden_out_name(layer_id)]
        return Chunk(start, stop, ids, rows, hidden)


def check_engine(engine: Engine, store: Store) -> None:
    """Refuses an engine that is not one of build() for this store's sizes."""
    config = store.config
    expected = {
        hidden_name(layer_id): (None, config.hc_mult, config.hidden_size)
        for layer_id in config.layer_ids
    }
    for name, shape in {"token_ids": (None,), **expected}.items():
        if name not in engine.inputs:
            raise InputError(
                f"engine: expected an input {name} for this store, found {', '.join(engine.inputs)}"
            )
        if engine.inputs[name].shape != shape:
            sizes = [size or "any" for size in engine.inputs[name].shape]
            raise InputError(
                f"engine: {name}: expected a hidden size of {list(shape[1:])}, found {sizes}"
            )
    for name in map(hidden_out_name, config.layer_ids):
        if name not in engine.outputs:
            found = ", ".join(engine.outputs) or "none"
            raise InputError(f"engine: expected an output {name} for this store, found {found}")
