# SPDX-License-Identifier: Apache-2.0
"""Rows of a table on disk: uniform random ids of each hash column, none of them kept in RAM,
against random reads of 4 KiB pages of the same file by the same queues and threads, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder import EngramLayout
from trtllm_engram.builder.checkpoint import VALUES
from trtllm_engram.builder.files import check_free_bytes
from trtllm_engram.builder.made_up import config_of_size
from trtllm_engram.builder.manifest import read_manifest
from trtllm_engram.plugins.errors import EngramError

from .. import _native
from ..tables import Tables
from .made_up_rows import made_up_rows, uniform_ids
from .measure import Measurement, median_seconds
from .tables import write_store

TOKENS = (64, 1024, 8192)
_NAME = "bench"
_LAYER = 1
_SEED = 0  # write_store's
_TURNS = 5
_PAGE_BYTES = 4096
_CHECKED_TOKENS = 8
_TARGET = 0.8
_SCALES = {"host": "scales in RAM", "with_rows": "scales on disk"}

_Ids = npt.NDArray[np.int32]


class _Bench:
    """A store of a made-up table in files of its own."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        check_free_bytes(folder, file_bytes)
        self.config = config_of_size(file_bytes, (_LAYER,))
        self.store = folder / "store"
        self.store.mkdir()
        write_store(self.store, self.config)
        manifest = read_manifest(self.store)
        span = manifest.span(self.store, manifest.layers[_LAYER][VALUES])
        self.file, self._num_pages = span.file, span.nbytes // _PAGE_BYTES
        self._layout = EngramLayout(self.config)
        self._rng = np.random.default_rng(0)

    def ids(self, num_tokens: int) -> _Ids:
        return uniform_ids(self._layout, num_tokens, self._rng)

    def check(self, tables: Tables) -> None:
        ids = self.ids(_CHECKED_TOKENS)
        expected = made_up_rows(self.config, _LAYER, ids, _SEED)
        if not np.array_equal(tables.lookup(_NAME, ids).view(np.int16), expected.view(np.int16)):
            raise EngramError("lookup: expected the rows of the table, found others")

    def measure(self, tables: Tables, num_tokens: int, about: str) -> Measurement:
        asked = [self.ids(num_tokens) for _ in range(_TURNS)]
        num_rows = asked[0].size
        pages = self._rng.integers(0, self._num_pages, (_TURNS, num_rows))

        def probe(turn: int) -> None:
            _native.read_pages(str(self.file), pages[turn].ctypes.data, num_rows)

        def num_reads() -> int:
            return int(tables.describe()[_NAME]["disk"]["num_reads"])

        before = num_reads()
        probed, looked_up = median_seconds(
            [probe, lambda turn: tables.lookup(_NAME, asked[turn])], _TURNS
        )
        return Measurement(
            f"T = {num_tokens}, {about}: {num_rows / looked_up:.0f} rows/s",
            (num_reads() - before) / _TURNS / looked_up,
            "reads",
            "4 KiB probe",
            num_rows / probed,
            _TARGET,
        )


def bench_lookup_disk(
    folder: Path, file_bytes: int, tokens: Sequence[int]
) -> Iterator[Measurement]:
    """Reads a second against the probe's. With scales in RAM a row is a read, unless rows share a
    page; with scales on disk it is two."""
    bench = _Bench(folder, file_bytes)
    for scales, about in _SCALES.items():
        with Tables() as tables:
            tables.bind(
                _NAME, bench.store, layer=_LAYER, placement="disk", scales=scales, hot_gib=0
            )
            bench.check(tables)
            for num_tokens in tokens:
                yield bench.measure(tables, num_tokens, about)
