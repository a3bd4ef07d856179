# SPDX-License-Identifier: Apache-2.0
"""All Engram layers of a store over the tokens of one or more requests, chunk by chunk.

    session = EngramSession(store, device="cuda:0")
    step = session.step({"a": tokens_a, "b": tokens_b})  # packed in this order, where each left off
    hidden = session.layer(1, step, hidden)  # [T, hc_mult, hidden], what the model's layer 1 gets

However a text is cut into steps, its row ids and rows are the same bits: the session carries the
tokens before each chunk. Results are numpy arrays on the CPU; on a GPU they are torch tensors where
hidden is one, else DeviceArrays.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.layers import table_name
from trtllm_engram.plugins.errors import InputError

from . import ops
from .arrays import Array
from .device_array import DeviceArray, cuda, current_device
from .devices import CPU, parse_device
from .hidden import HiddenSource
from .row import packed_row_bytes
from .store import Store
from .tables import Tables

DEFAULT_CHUNK = 1024  # tokens
_RESERVED_BYTES = 2 << 30  # of GPU memory, for weights, activations and the CUDA context

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
Mask = Sequence[bool] | npt.NDArray[np.bool_]
_Ids = npt.NDArray[np.int32]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Step:
    """The tokens of one call, requests packed one after the other, and their row ids."""

    hash_ids: Array  # int32 [T, L, C] on the session's device
    positions: npt.NDArray[np.int64]  # [T] of each token in its request
    cu_seqlens: npt.NDArray[np.int32]  # [B+1]

    @property
    def num_tokens(self) -> int:
        return self.positions.size


@dataclass(frozen=True)
class Chunk:
    """What `EngramSession.run` yields: results for tokens start..stop, on the host."""

    start: int
    stop: int
    hash_ids: npt.NDArray[np.int32]  # [n, L, C]
    rows: dict[int, npt.NDArray[Any]]  # by layer id, BF16 [n, C*D]
    hidden: dict[int, npt.NDArray[Any]]  # by layer id, [n, hc_mult, hidden] of the input's dtype


@dataclass(frozen=True)
class _Past:
    """A request between two steps: its next position, the N-1 tokens before it, nearest first."""

    position: int
    ids: _Ids
    dead: _Flags

    def after(self, ids: _Ids, dead: _Flags) -> _Past:
        window = self.ids.size
        return _Past(
            self.position + ids.size,
            np.concatenate([ids[::-1], self.ids])[:window],
            np.concatenate([dead[::-1], self.dead])[:window],
        )


class EngramSession:
    """Runs a store's layers on one device: "cpu" or "cuda:N".

    On a GPU the tables are copied into its memory where they fit; where they do not, rows are
    looked up on the CPU and copied over. With `tables`, rows are those of Tables.of_store instead,
    wherever they lie. Requests are named by anything hashable and live until `forget`.
    """

    def __init__(self, store: Store, device: str = CPU, tables: Tables | None = None) -> None:
        self.store = store
        self.config = store.config
        self.device = device
        self._ordinal = parse_device(device)
        self._bound = tables
        self._weights = {layer_id: store.weights(layer_id) for layer_id in store.config.layer_ids}
        self._requests: dict[Hashable, _Past] = {}
        self._on_device: dict[Any, Any] = {}  # uploads, made when first needed
        self.tables_on_device = (
            tables is not None or self._ordinal is None or self._tables_fit(self._ordinal)
        )

    def step(
        self,
        tokens: Mapping[Hashable, TokenIds] | TokenIds,
        dead: Mapping[Hashable, Mask] | Mask | None = None,
    ) -> Step:
        """Row ids of the next tokens of each request; a bare sequence belongs to the request None.

        `dead` marks tokens that are no text (image spans): for the n-grams of later tokens they and
        all before them do not exist. A refused call leaves every request as it was.
        """
        ids, masks = self._checked(tokens, dead)
        pasts = {name: self._requests.get(name, self._new_request()) for name in ids}
        positions = [past.position + np.arange(ids[name].size) for name, past in pasts.items()]
        cu_seqlens = np.cumsum([0] + [part.size for part in positions], dtype=np.int32)
        packed_positions = np.concatenate(positions)
        goes_on = any(past.position for past in pasts.values())  # else there is no lookback
        lookback_dead = np.stack([past.dead for past in pasts.values()])
        dead_mask = np.concatenate(list(masks.values()))
        step = self.hash(
            np.concatenate(list(ids.values())),
            packed_positions,
            cu_seqlens,
            np.stack([past.ids for past in pasts.values()]) if goes_on else None,
            lookback_dead if lookback_dead.any() else None,
            dead_mask if dead_mask.any() else None,
        )
        for name, past in pasts.items():
            self._requests[name] = past.after(ids[name], masks[name])
        return step

    def hash(
        self,
        token_ids: _Ids,
        positions: npt.NDArray[np.int64],
        cu_seqlens: npt.NDArray[np.int32],
        lookback_ids: _Ids | None = None,
        lookback_dead: _Flags | None = None,
        dead_mask: _Flags | None = None,
    ) -> Step:
        """A step of requests whose past the caller carries: ops.hash_ids' arguments, on the host.
        `step` carries it itself."""
        optional = (lookback_ids, lookback_dead, dead_mask)
        hash_ids = ops.hash_ids(
            self.store.layout,
            self._kept("token_map", self.store.token_map),
            self.to_device(token_ids),
            self.to_device(positions),
            self.to_device(cu_seqlens),
            *(None if array is None else self.to_device(array) for array in optional),
        )
        return Step(hash_ids, positions, cu_seqlens)

    def forget(self, request: Hashable = None) -> None:
        """Ends a request; its name may start a new one."""
        self._requests.pop(request, None)

    def rows(self, layer_id: int, step: Step) -> Array:
        """BF16 [T, C*D]: the rows of a layer's table."""
        index = self._layer_index(layer_id)
        if self._bound is not None:
            on_cpu = self._ordinal is None
            ids = step.hash_ids[:, index] if on_cpu else _LayerIds(step.hash_ids, index)
            rows = self._bound.lookup(table_name(layer_id), ids)
            if on_cpu:  # of rows on disk: now, not with the next step
                self._bound.raise_fault(table_name(layer_id))
            return rows
        table = self.store.table(layer_id)
        if self._ordinal is None:
            return ops.lookup(table.values, table.scales, step.hash_ids[:, index])
        if not self.tables_on_device:
            ids = self.to_host(step.hash_ids)[:, index]
            return self.to_device(ops.lookup(table.values, table.scales, ids))
        values = self._kept((layer_id, "values"), table.values)
        scales = self._kept((layer_id, "scales"), table.scales)
        return ops.lookup(values, scales, _LayerIds(step.hash_ids, index))

    def project(self, layer_id: int, rows: Array) -> Array:
        """BF16 [T, (hc_mult+1)*hidden]: the keys, then the value."""
        self._layer_index(layer_id)
        weights = self._weights[layer_id]
        weight = self._kept((layer_id, "wkv_weight"), weights.wkv_weight)
        return ops.project(rows, weight, self._kept((layer_id, "wkv_scale"), weights.wkv_scale))

    def gate(
        self, layer_id: int, hidden: Array, kv: Array, token_mask: Mask | Array | None = None
    ) -> Array:
        """hidden plus the gated value, [T, hc_mult, hidden]; a token masked False stays."""
        self._layer_index(layer_id)
        weights = self._weights[layer_id]
        return ops.gate(
            hidden,
            kv,
            self._kept((layer_id, "q_weight"), weights.q_weight),
            self._kept((layer_id, "k_weight"), weights.k_weight),
            self.config.rms_norm_eps,
            token_mask=token_mask,
        )

    def layer(
        self, layer_id: int, step: Step, hidden: Array, token_mask: Mask | Array | None = None
    ) -> Array:
        """A whole Engram layer: rows, projection and gate."""
        kv = self.project(layer_id, self.rows(layer_id, step))
        return self.gate(layer_id, hidden, kv, token_mask)

    def run(
        self,
        token_ids: TokenIds,
        hidden: HiddenSource,
        chunk: int = DEFAULT_CHUNK,
        dead: Mask | None = None,
    ) -> Iterator[Chunk]:
        """One text through every layer, `chunk` tokens at a time; dead tokens stay as they are."""
        if chunk < 1:
            raise InputError(f"chunk: expected at least 1 token, found {chunk}")
        ids = as_token_ids(token_ids, self.store.token_map.size)
        dead_mask = _as_mask(dead, ids.size)
        request = object()
        try:
            for start in range(0, ids.size, chunk):
                stop = min(start + chunk, ids.size)
                step = self.step({request: ids[start:stop]}, {request: dead_mask[start:stop]})
                token_mask = self.to_device(~dead_mask[start:stop])
                rows = {layer_id: self.rows(layer_id, step) for layer_id in self.config.layer_ids}
                out = {}
                for layer_id in self.config.layer_ids:
                    given = self.to_device(hidden(layer_id, start, stop))
                    kv = self.project(layer_id, rows[layer_id])
                    out[layer_id] = self.to_host(self.gate(layer_id, given, kv, token_mask))
                host_rows = {layer_id: self.to_host(array) for layer_id, array in rows.items()}
                yield Chunk(start, stop, self.to_host(step.hash_ids), host_rows, out)
        finally:
            self.forget(request)

    def to_device(self, array: npt.NDArray[Any]) -> Array:
        """A numpy array on the session's device: itself on the CPU, a copy on a GPU."""
        return array if self._ordinal is None else DeviceArray.from_host(array, self._ordinal)

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """An op's result as a numpy array, once it is done."""
        result: npt.NDArray[Any] = array if self._ordinal is None else array.copy_to_host()
        return result

    def synchronize(self) -> None:
        """Waits for all that the session has enqueued; on the CPU ops return when they are done."""
        if self._ordinal is not None:
            with current_device(self._ordinal):
                cuda("cudaDeviceSynchronize")

    def _checked(
        self,
        tokens: Mapping[Hashable, TokenIds] | TokenIds,
        dead: Mapping[Hashable, Mask] | Mask | None,
    ) -> tuple[dict[Hashable, _Ids], dict[Hashable, _Flags]]:
        """Token ids and dead masks by request; the GPU would tell of a bad id only later."""
        by_request: dict[Hashable, Any] = {None: tokens}
        if isinstance(tokens, Mapping):
            by_request = dict(tokens)
        dead_by_request: dict[Hashable, Any] = {} if dead is None else {None: dead}
        if isinstance(dead, Mapping):
            dead_by_request = dict(dead)
        if not by_request:
            raise InputError("step: expected at least one request, found none")
        for name in dead_by_request:
            if name not in by_request:
                raise InputError(f"dead: expected requests of this step, found {name!r}")
        vocab_size = self.store.token_map.size
        ids = {name: as_token_ids(part, vocab_size) for name, part in by_request.items()}
        masks = {name: _as_mask(dead_by_request.get(name), ids[name].size) for name in ids}
        return ids, masks

    def _new_request(self) -> _Past:
        window = self.config.max_ngram_size - 1
        return _Past(0, np.full(window, -1, np.int32), np.zeros(window, np.bool_))

    def _layer_index(self, layer_id: int) -> int:
        if layer_id not in self.config.layer_ids:
            known = ", ".join(map(str, self.config.layer_ids))
            raise InputError(f"layer: expected one of {known}, found {layer_id}")
        return self.config.layer_ids.index(layer_id)

    def _kept(self, key: Any, array: npt.NDArray[Any]) -> Array:
        if self._ordinal is None:
            return array
        if key not in self._on_device:
            self._on_device[key] = self.to_device(array)
        return self._on_device[key]

    def _tables_fit(self, ordinal: int) -> bool:
        row_bytes = packed_row_bytes(self.config.head_dim)
        with current_device(ordinal):
            free_bytes, _ = cuda("cudaMemGetInfo")
        return sum(self.config.num_embeddings) * row_bytes + _RESERVED_BYTES <= int(free_bytes)


class _LayerIds:
    """One layer's ids [T, C] inside a device array [T, L, C]: DeviceArray makes no views."""

    def __init__(self, hash_ids: Any, layer_index: int) -> None:
        self._hash_ids = hash_ids
        num_tokens, num_layers, num_columns = hash_ids.shape
        interface = hash_ids.__cuda_array_interface__
        pointer, read_only = interface["data"]
        item = hash_ids.dtype.itemsize
        offset = layer_index * num_columns * item if num_tokens else 0  # no memory: pointer 0
        self.__cuda_array_interface__ = interface | {
            "shape": (num_tokens, num_columns),
            "strides": (num_layers * num_columns * item, item),
            "data": (pointer + offset, read_only),
        }


def as_token_ids(token_ids: TokenIds, vocab_size: int) -> _Ids:
    """Token ids int32 [T], each below vocab_size; InputError for others."""
    array = np.asarray(token_ids)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InputError(
            f"token ids: expected integers of shape [T], found {array.dtype} {list(array.shape)}"
        )
    for found in (int(array.min()), int(array.max())):
        if not 0 <= found < vocab_size:
            raise InputError(f"token ids: expected 0 to {vocab_size - 1}, found {found}")
    return np.ascontiguousarray(array, dtype=np.int32)


def _as_mask(mask: Mask | None, size: int) -> _Flags:
    if mask is None:
        return np.zeros(size, np.bool_)
    array = np.ascontiguousarray(mask)
    if array.shape != (size,) or array.dtype != np.bool_:
        raise InputError(f"dead: expected bool [{size}], found {array.dtype} {list(array.shape)}")
    return array
