# SPDX-License-Identifier: Apache-2.0
"""A rank of `bench tables`: python -m trtllm_engram.runtime.bench.tables_rank JSON

JSON is {store, seed, tables, group, touched_bytes}: tables are bind_all's, group has Group's
arguments, touched_bytes are of measure's touch_memory. It prints {} once it is warm. At the first
line of input it binds the tables, for its GPU where there is one, checks rows, and prints {seconds,
tables}, seconds being those until all could be read. For every line after that it reads each page
of its tables and prints {pss_bytes}, their memory as this process has it mapped: what is shared
counts in parts, one for each that has mapped it. It ends with its input.
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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_engram.builder.config import SCALE_BLOCK, EngramConfig
from trtllm_engram.builder.made_up import config_of_size, write_made_up_store
from trtllm_engram.builder.manifest import read_manifest
from trtllm_engram.plugins.errors import EngramError, InputError

from .. import _native
from ..devices import num_gpus
from ..group import Group
from ..machine import read_text
from ..tables import Tables
from .made_up_rows import made_up_rows
from .measure import touch_memory

_CHECKED_TOKENS = 64
_WARM_UP_BYTES = 1 << 20
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")  # begins an entry of smaps


def main(text: str) -> None:
    job = json.loads(text)
    _warm_up(job["group"]["rank"])
    if job["touched_bytes"]:
        touch_memory(job["touched_bytes"])
    _tell({})
    if not sys.stdin.readline():
        return
    with Tables(Group(**job["group"])) as tables:
        started = time.perf_counter()
        tables.bind_all(job["tables"])
        _register(job["tables"], job["group"]["rank"])
        seconds = time.perf_counter() - started
        config = read_manifest(job["store"]).config
        for name, table in tables.describe().items():
            _check(tables, name, config, table, job["seed"])
        _tell({"seconds": seconds, "tables": tables.describe()})
        for _ in sys.stdin:
            _tell({"pss_bytes": _pss_bytes(list(_arrays(tables)))})


def _register(names: Iterable[str], rank: int) -> None:
    """With the rank's GPU, where there is one: a rank alone has not done so yet."""
    if count := _num_gpus():
        for name in names:
            _native.table_view(name, rank % count)


_num_gpus = cache(num_gpus)  # asked for within what is timed


def _warm_up(rank: int) -> None:
    """Does all on a small table that is not to be measured: loads the library, and starts CUDA
    where there is a GPU to register memory with."""
    config = config_of_size(_WARM_UP_BYTES, layers=(0,))
    with tempfile.TemporaryDirectory(prefix="trtllm-engram-") as folder:
        write_made_up_store(folder, config)
        with Tables(Group(rank=0, size=1)) as tables:
            tables.bind("warm-up", folder, layer=0, formula_seed=0)
            _register(["warm-up"], rank)
            _check(tables, "warm-up", config, tables.describe()["warm-up"], 0)


def _check(
    tables: Tables, name: str, config: EngramConfig, table: dict[str, Any], seed: int
) -> None:
    shape = (_CHECKED_TOKENS, config.num_columns)
    places = np.linspace(0, table["num_rows"] - 1, _CHECKED_TOKENS * config.num_columns)
    ids = places.astype(np.int32).reshape(shape)
    right = made_up_rows(config, table["layer"], ids, seed)
    if not np.array_equal(tables.lookup(name, ids).view(np.uint16), right.view(np.uint16)):
        raise EngramError(f"{name}: expected the formula's rows, found others")


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
