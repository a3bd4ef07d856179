# SPDX-License-Identifier: Apache-2.0
"""A rank of `bench tables` and `bench node`: python -m trtllm_engram.runtime.bench.tables_rank JSON

JSON is {store, seed, tables, group, touched_bytes}: tables are bind_all's, group has Group's
arguments, touched_bytes are of measure's touch_memory. It prints {} once it is warm. At the first
line of input it binds the tables, for its GPU where there is one, checks rows, and prints {seconds,
tables}, seconds being those until all could be read. Every line after that is a question:

    {"do": "pss"}                 reads each page of its tables: {pss_bytes}, their memory as this
                                  process has it mapped: what is shared counts in parts, one for
                                  each that has mapped it
    {"do": "rate", "tokens": T}   looks T tokens up, other ids in each call: {tokens_per_s}
    {"do": "work", "seconds": S}  looks up for so long, then checks rows again: {lookups}

Lookups are the GPU's where there is one. It ends with its input.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from trtllm_engram.builder.config import SCALE_BLOCK, EngramConfig
from trtllm_engram.builder.made_up import config_of_size, write_made_up_store
from trtllm_engram.builder.manifest import read_manifest
from trtllm_engram.plugins.errors import EngramError, InputError

from .. import _native
from ..device_array import DeviceArray, cuda, current_device
from ..devices import num_gpus
from ..group import Group
from ..machine import read_text
from ..tables import Tables
from .made_up_rows import made_up_rows
from .measure import touch_memory

_CHECKED_TOKENS = 64
_RATE_SECONDS = 0.5
_CALLS_UNDER_WAY = 16
_ID_SETS = 8
_WORK_TOKENS = 1024
_WARM_UP_BYTES = 1 << 20
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")  # begins an entry of smaps


def main(text: str) -> None:
    job = json.loads(text)
    device = _device_of(job["group"]["rank"])
    if device is not None:
        cuda("cudaSetDevice", device)  # as a model's ranks choose theirs before they bind
    _warm_up(device)
    if job["touched_bytes"]:
        touch_memory(job["touched_bytes"])
    _tell({})
    if not sys.stdin.readline():
        return
    with Tables(Group(**job["group"])) as tables:
        started = time.perf_counter()
        tables.bind_all(job["tables"])
        _register(job["tables"], device)
        seconds = time.perf_counter() - started
        lookups = _Lookups(tables, job, device)
        lookups.check()
        _tell({"seconds": seconds, "tables": tables.describe()})
        for line in sys.stdin:
            question = json.loads(line)
            if question["do"] == "rate":
                _tell({"tokens_per_s": lookups.rate(question["tokens"])})
            elif question["do"] == "work":
                _tell({"lookups": lookups.work(question["seconds"])})
            else:
                _tell({"pss_bytes": _pss_bytes(list(_arrays(tables)))})


def _device_of(rank: int) -> int | None:
    """Ranks take the GPUs in turn."""
    count = num_gpus()
    return rank % count if count else None


def _register(names: Iterable[str], device: int | None) -> None:
    """With the rank's GPU, where there is one: a rank alone has not done so yet."""
    if device is not None:
        for name in names:
            _native.table_view(name, device)


def _warm_up(device: int | None) -> None:
    """Does all on a small table that is not to be measured: loads the library, and starts CUDA
    where there is a GPU to register memory with."""
    config = config_of_size(_WARM_UP_BYTES, layers=(0,))
    with tempfile.TemporaryDirectory(prefix="trtllm-engram-") as folder:
        write_made_up_store(folder, config)
        with Tables(Group(rank=0, size=1)) as tables:
            tables.bind("warm-up", folder, layer=0, formula_seed=0)
            _register(["warm-up"], device)
            _check(tables, "warm-up", config, 0, None)


def _check(tables: Tables, name: str, config: EngramConfig, seed: int, device: int | None) -> None:
    """Rows from all over a table, looked up by a GPU or, where `device` is None, by the CPU."""
    table = tables.describe()[name]
    shape = (_CHECKED_TOKENS, config.num_columns)
    places = np.linspace(0, table["num_rows"] - 1, _CHECKED_TOKENS * config.num_columns)
    ids = places.astype(np.int32).reshape(shape)
    right = made_up_rows(config, table["layer"], ids, seed)
    if device is None:
        found = tables.lookup(name, ids)
    else:
        found = tables.lookup(name, DeviceArray.from_host(ids, device)).copy_to_host()
    if not np.array_equal(found.view(np.uint16), right.view(np.uint16)):
        raise EngramError(f"{name}: expected the formula's rows, found others")


class _Lookups:
    """Lookups of a rank: on its GPU, or on the CPU where there is none."""

    def __init__(self, tables: Tables, job: dict[str, Any], device: int | None) -> None:
        self._tables, self._seed, self._device = tables, job["seed"], device
        self._config = read_manifest(job["store"]).config
        self._first, about = next(iter(tables.describe().items()))
        self._num_rows: int = about["num_rows"]
        self._arrays: dict[int, tuple[Iterator[Any], Any]] = {}

    def check(self) -> None:
        """By each that can read them: a CPU does not see what lies in GPU memory."""
        for name, table in self._tables.describe().items():
            _check(self._tables, name, self._config, self._seed, self._device)
            if self._device is not None and table["placement"] == "host":
                _check(self._tables, name, self._config, self._seed, None)

    def rate(self, num_tokens: int) -> float:
        """Tokens a second of lookups in the first table, several under way at a time."""
        self._look_up(num_tokens, calls=_CALLS_UNDER_WAY)
        calls, started = 0, time.perf_counter()
        while (seconds := time.perf_counter() - started) < _RATE_SECONDS:
            self._look_up(num_tokens, calls=_CALLS_UNDER_WAY)
            calls += _CALLS_UNDER_WAY
        return calls * num_tokens / seconds

    def work(self, seconds: float) -> int:
        lookups, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._look_up(_WORK_TOKENS, calls=_CALLS_UNDER_WAY)
            lookups += _CALLS_UNDER_WAY
        self.check()
        return lookups

    def _look_up(self, num_tokens: int, calls: int) -> None:
        ids, out = self._arrays_of(num_tokens)
        for _ in range(calls):
            self._tables.lookup(self._first, next(ids), out=out)
        if self._device is not None:
            with current_device(self._device):
                cuda("cudaDeviceSynchronize")

    def _arrays_of(self, num_tokens: int) -> tuple[Iterator[Any], Any]:
        """Ids for one call after the other, and the result."""
        if num_tokens not in self._arrays:
            self._arrays[num_tokens] = self._make_arrays(num_tokens)
        return self._arrays[num_tokens]

    def _make_arrays(self, num_tokens: int) -> tuple[Iterator[Any], Any]:
        rng = np.random.default_rng(num_tokens)
        shape = (_ID_SETS, num_tokens, self._config.num_columns)
        ids = rng.integers(0, self._num_rows, shape, dtype=np.int32)
        out_shape = (num_tokens, self._config.num_columns * self._config.head_dim)
        if self._device is None:
            return cycle(list(ids)), np.empty(out_shape, ml_dtypes.bfloat16)
        on_gpu = [DeviceArray.from_host(one, self._device) for one in ids]
        return cycle(on_gpu), DeviceArray(out_shape, ml_dtypes.bfloat16, self._device)


def _arrays(tables: Tables) -> Iterator[range]:
    """The addresses of the tables' arrays in host memory."""
    for name, table in tables.describe().items():
        view = _native.table_host_view(name)
        for address, row_bytes in (
            (view.values, table["head_dim"]),
            (view.scales, table["head_dim"] // SCALE_BLOCK),
        ):
            yield range(address, address + table["num_rows"] * row_bytes)


def _pss_bytes(arrays: list[range]) -> int:
    for array in arrays:
        bytes_there = (ctypes.c_uint8 * len(array)).from_address(array.start)
        np.ctypeslib.as_array(bytes_there)[:: mmap.PAGESIZE].max()
    kilobytes, counts = 0, False
    for line in read_text(Path("/proc/self/smaps")).splitlines():
        if mapping := _MAPPING.match(line):
            begin, end = (int(address, 16) for address in mapping.groups())
            counts = any(begin < array.stop and array.start < end for array in arrays)
        elif counts and line.startswith("Pss:"):
            kilobytes += int(line.split()[1])
    return kilobytes * 1024


def _tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (EngramError, InputError) as error:
        sys.exit(str(error))
