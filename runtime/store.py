# SPDX-License-Identifier: Apache-2.0
"""Stores opened for use: tables mapped into memory, small weights on demand."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.checkpoint import SCALES, VALUES
from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.files import check_writable, reading, refuse_to_replace
from trtllm_engram.builder.layout import EngramLayout
from trtllm_engram.builder.manifest import Manifest, Part, read_manifest
from trtllm_engram.plugins.errors import InputError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Table:
    """A layer's rows: values FP8 [rows, D] and scales E8M0 [rows, D/32], as read-only bytes that
    the kernel reads from the file when they are touched."""

    values: Bytes
    scales: Bytes


@dataclass(frozen=True)
class LayerWeights:
    """A layer's projection and gate: wkv_weight FP8 [(hc_mult+1)*hidden, C*D], wkv_scale E8M0 (one
    per 32x32 block), q_weight and k_weight BF16 [hc_mult, hidden]."""

    wkv_weight: Bytes
    wkv_scale: Bytes
    q_weight: npt.NDArray[Any]
    k_weight: npt.NDArray[Any]


class Store:
    """A store whose files are those that were prepared.

    Attributes:
        path: the store's folder.
        manifest: what engram.json says.
        config, layout: of the model.
        token_map: int32 [vocab], read-only.
        tokenizer_json: the tokenizer that the token map was made from.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._tables: dict[int, Table] = {}
        self._weights: dict[int, LayerWeights] = {}
        manifest.check_files(path)
        self.token_map: npt.NDArray[np.int32] = self._map(manifest.token_map, np.int32)
        if manifest.fingerprint != self.layout.fingerprint(self.token_map):
            raise InputError(f"{self._file(manifest.token_map)}: not the token map of this store")

    @property
    def config(self) -> EngramConfig:
        return self.manifest.config

    @property
    def layout(self) -> EngramLayout:
        return self.manifest.layout

    @property
    def tokenizer_json(self) -> Path:
        return self._file(self.manifest.tokenizer)

    def table(self, layer_id: int) -> Table:
        """The rows of a layer."""
        if layer_id not in self._tables:
            parts = self._layer(layer_id)
            # Rows are read here and there: reading ahead would fetch 128 KiB for each.
            values, scales = (
                self._map(parts[name], advice=mmap.MADV_RANDOM) for name in (VALUES, SCALES)
            )
            self._tables[layer_id] = Table(values, scales)
        return self._tables[layer_id]

    def weights(self, layer_id: int) -> LayerWeights:
        """The projection and the gate of a layer."""
        if layer_id not in self._weights:
            parts = self._layer(layer_id)
            self._weights[layer_id] = LayerWeights(
                wkv_weight=self._map(parts["wkv.weight"]),
                wkv_scale=self._map(parts["wkv.scale"]),
                q_weight=self._map(parts["q_weight"], ml_dtypes.bfloat16),
                k_weight=self._map(parts["k_weight"], ml_dtypes.bfloat16),
            )
        return self._weights[layer_id]

    def check_output(self, path: Path) -> None:
        """Refuses what cannot be written, and to have a file of the store or of its checkpoint
        overwritten."""
        refuse_to_replace(path, self.manifest.files(self.path))
        check_writable(path)

    def _layer(self, layer_id: int) -> dict[str, Part]:
        if layer_id not in self.manifest.layers:
            raise InputError(
                f"layer: expected one of {list(self.config.layer_ids)}, found {layer_id}"
            )
        return self.manifest.layers[layer_id]

    def _file(self, part: Part) -> Path:
        return self.manifest.span(self.path, part).file

    def _map(
        self, part: Part, dtype: Any = np.uint8, advice: int = mmap.MADV_NORMAL
    ) -> npt.NDArray[Any]:
        """A part as a read-only array over its file's pages."""
        span = self.manifest.span(self.path, part)
        page_offset = span.offset % mmap.ALLOCATIONGRANULARITY
        with reading(span.file), span.file.open("rb") as file:
            pages = mmap.mmap(
                file.fileno(),
                page_offset + span.nbytes,
                access=mmap.ACCESS_READ,
                offset=span.offset - page_offset,
            )
        pages.madvise(advice)
        count = span.nbytes // np.dtype(dtype).itemsize
        return np.frombuffer(pages, dtype, count, page_offset).reshape(part.shape)


def open_store(
    path: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> Store:
    """Opens a store, read-only; checkpoint says where its checkpoint lies now, if it was moved."""
    return Store(Path(path), read_manifest(path, checkpoint))
