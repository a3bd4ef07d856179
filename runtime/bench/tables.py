# SPDX-License-Identifier: Apache-2.0
"""Shared tables: loading files against dd, memory of all ranks against the table's bytes, and how
fast a restarted rank attaches to a keeper. Ranks are processes (tables_rank.py) that check rows."""

from __future__ import annotations

import contextlib
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_engram.builder.checkpoint import SCALES, VALUES
from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.files import check_free_bytes, sync, writing
from trtllm_engram.builder.formula import Formula
from trtllm_engram.builder.layers import table_name
from trtllm_engram.builder.made_up import config_of_size, write_made_up_store
from trtllm_engram.builder.manifest import read_manifest
from trtllm_engram.plugins.errors import EngramError

from ..machine import memory_info
from .measure import median_seconds, num_cores, touch_memory

_TURNS = 3
_RAM_FOLDER = Path("/dev/shm")  # where dd writes to memory
_LAYERS = (1,)
_SEED = 0
_ATTACH_S = 2.0  # for 64 GiB
_ATTACH_BYTES = 64 << 30
_LOAD_SHARE = 0.8
_MEMORY_SHARES = (0.98, 1.02)  # less is a table that was not seen whole


@dataclass(frozen=True)
class Figure:
    """A number beside what it is held against."""

    name: str
    value: float
    unit: str  # "B/s", "B" or "s"
    against: str
    limit: float
    target: str
    met: bool | None  # None: nothing is asked of it

    @property
    def share(self) -> float:
        return self.value / self.limit if self.limit else 0.0


def bench_load(folder: Path, file_bytes: int, num_ranks: int, memory: str) -> list[Figure]:
    """A store whose files are in the page cache, loaded by ranks and copied to /dev/shm by dd.

    As many dd run at once as the ranks have threads that read, each with a part of every file, and
    with 1 MiB at a time: its buffer stays in a core's cache, which is dd's fastest. Both allocate
    what they fill within the time measured, the table on huge pages and dd's files as the machine's
    tmpfs does, from memory just touched (touch_memory).
    """
    config = config_of_size(file_bytes, _LAYERS)
    store = folder / "store"
    store.mkdir()
    files = write_store(store, config)
    table_bytes = sum(file.stat().st_size for file in files)
    check_free_bytes(_RAM_FOLDER, table_bytes)
    readers = num_ranks * min(16, max(4, num_cores() // num_ranks))  # loader_threads of load.h
    loads: list[list[dict[str, Any]]] = []

    def load(_turn: int) -> None:
        with ranks(store, num_ranks, {"memory": memory}, touched_bytes=table_bytes) as started:
            loads.append([rank.loaded for rank in started])

    with tempfile.TemporaryDirectory(prefix="trtllm-engram-bench-", dir=_RAM_FOLDER) as scratch:

        def before() -> None:
            _warm(files, Path(scratch))
            touch_memory(table_bytes)

        dd, _ = median_seconds(
            [lambda _: _copy_by_dd(files, Path(scratch), readers), load], _TURNS, before
        )
    seconds = statistics.median(bind_seconds(one) for one in loads)
    rate, dd_rate = table_bytes / seconds, table_bytes / dd
    return [
        Figure(
            f"load, {_count(num_ranks)}, warm cache",
            rate,
            "B/s",
            f"{readers} dd",
            dd_rate,
            f"{_LOAD_SHARE:.0%}",
            rate >= _LOAD_SHARE * dd_rate,
        )
    ]


def bench_memory(store: Path, num_ranks: int, memory: str) -> list[Figure]:
    """What ranks that hold a made-up table have of it: the PSS of its mappings, or, of memory that
    is CUDA's (cumem), what the machine has less of free memory than when all ranks were warm."""
    options = {"memory": memory, "formula_seed": _SEED}
    with weighed_ranks(store, num_ranks, options) as (started, used):
        table_bytes = bytes_of(started[0].loaded)
        if memory != "cumem":
            for rank in started:
                rank.ask("pss")  # a page counts for those alone that have come by it
            used = sum(rank.ask("pss")["pss_bytes"] for rank in started)
    low, high = _MEMORY_SHARES
    return [
        Figure(
            f"memory of {_count(num_ranks)}",
            used,
            "B",
            "the table",
            table_bytes,
            f"{low:.0%} to {high:.0%}",
            low * table_bytes <= used <= high * table_bytes,
        )
    ]


def bench_keeper(store: Path) -> list[Figure]:
    """A rank that is started again and again beside a keeper of a made-up table."""
    name = f"bench-{secrets.token_hex(4)}"
    with _keeper(store, name) as keeper:
        table_bytes = sum(one["num_bytes"] for one in keeper["keeper"]["tables"])
        answers = []
        for _ in range(_TURNS):
            with ranks(store, 1, {"memory": "keeper", "formula_seed": _SEED}, name) as started:
                answers.append([started[0].loaded])
    attach = statistics.median(bind_seconds(one) for one in answers)
    registration = statistics.median(registered_seconds(one) for one in answers)
    allowed = _ATTACH_S * max(1.0, table_bytes / _ATTACH_BYTES)
    figures = [
        Figure(
            "restart beside a keeper",
            attach,
            "s",
            "loading it",
            keeper["seconds"],
            f"{allowed:g} s",
            attach <= allowed,
        )
    ]
    if registration > 0:  # where there is a GPU
        figures.append(Figure("  registering with the GPU", registration, "s", "", 0.0, "", None))
    return figures


@contextlib.contextmanager
def made_up_store(num_bytes: int, layers: Sequence[int] = _LAYERS) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="trtllm-engram-bench-") as folder:
        write_made_up_store(folder, config_of_size(num_bytes, layers))
        yield Path(folder)


class Rank:
    """One rank's process."""

    def __init__(self, job: dict[str, Any]) -> None:
        words = [sys.executable, "-m", f"{__package__}.tables_rank", json.dumps(job)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.loaded: dict[str, Any] = {}

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, errors = self._process.communicate()
            raise EngramError(" ".join(errors.split()) or "a rank ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def go_on(self, do: str = "", **arguments: Any) -> None:
        """Sends a question of tables_rank.py's, or that it is to bind."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() says why it ended
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.go_on(do, **arguments)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def ranks(
    store: Path,
    count: int,
    options: dict[str, Any],
    keeper: str | None = None,
    touched_bytes: int = 0,
    when_warm: Callable[[], None] = lambda: None,
) -> Iterator[list[Rank]]:
    """Ranks that have loaded the store's tables, and hold them; they touch memory before, and
    when_warm is called when all are ready to bind."""
    layers = read_manifest(store).config.layer_ids
    tables = {
        table_name(layer): {"store": str(store), "layer": layer, **options} for layer in layers
    }
    job = {
        "store": str(store),
        "seed": _SEED,
        "tables": tables,
        "touched_bytes": touched_bytes // count,
    }
    group = {"name": secrets.token_hex(8), "size": count, "keeper": keeper}
    started = [Rank(job | {"group": group | {"rank": rank}}) for rank in range(count)]
    try:
        for rank in started:
            rank.answer()
        when_warm()
        for rank in started:
            rank.go_on()
        for rank in started:
            rank.loaded = rank.answer()
        yield started
    finally:
        for rank in started:
            rank.end()


@contextlib.contextmanager
def weighed_ranks(
    store: Path, count: int, options: dict[str, Any]
) -> Iterator[tuple[list[Rank], int]]:
    """ranks(), and how much less free memory the machine has than when all were warm."""
    free_bytes: list[int] = []

    def note_free() -> None:
        free_bytes.append(memory_info()["MemFree"])

    with ranks(store, count, options, when_warm=note_free) as started:
        note_free()
        yield started, free_bytes[0] - free_bytes[1]


@contextlib.contextmanager
def _keeper(store: Path, name: str) -> Iterator[dict[str, Any]]:
    words = [sys.executable, "-m", "trtllm_engram.runtime.cli", "tables", "serve", str(store)]
    words += ["--formula", "--seed", str(_SEED), "--name", name, "--json"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield _read_document(process.stdout)
        except EOFError:
            _, errors = process.communicate()
            raise EngramError(" ".join(errors.split())) from None
        finally:
            process.terminate()


def _read_document(lines: Any) -> dict[str, Any]:
    """The one JSON object that a process prints, which goes on afterwards."""
    text = ""
    for line in lines:
        text += line
        if line == "}\n":
            document: dict[str, Any] = json.loads(text)
            return document
    raise EOFError


def bytes_of(loaded: dict[str, Any]) -> int:
    """Of all tables, that a rank has."""
    return sum(table["num_bytes"] for table in loaded["tables"].values())


def bind_seconds(loaded: Sequence[dict[str, Any]]) -> float:
    """From when the last rank came until all had their tables, without the registration."""
    seconds: float = min(one["seconds"] for one in loaded)
    return seconds - registered_seconds(loaded)


def registered_seconds(loaded: Sequence[dict[str, Any]]) -> float:
    seconds: float = max(
        sum(table["registered_seconds"] or 0.0 for table in one["tables"].values())
        for one in loaded
    )
    return seconds


def write_store(store: Path, config: EngramConfig) -> list[Path]:
    """A made-up store with its tables' files, which are returned; their bytes are the formula's."""
    write_made_up_store(store, config)
    manifest = read_manifest(store)
    files = []
    for layer_id, parts in manifest.layers.items():
        for name in (VALUES, SCALES):
            span = manifest.span(store, parts[name])
            with writing(span.file):
                with span.file.open("wb") as file:
                    for _, data in Formula(config, layer_id, name, _SEED).chunks(0, span.nbytes):
                        file.write(data)
                sync(span.file)
            files.append(span.file)
    return files


def _copy_by_dd(files: Sequence[Path], target: Path, readers: int) -> None:
    """Each reader copies its part of each file into a file of its own."""
    processes = []
    for reader in range(readers):
        script, words = [], []
        for index, file in enumerate(files):
            size = file.stat().st_size
            begin, end = size * reader // readers, size * (reader + 1) // readers
            script.append(
                f'dd if="${2 * index + 1}" of="${2 * index + 2}" bs=1M status=none '
                f"iflag=skip_bytes,count_bytes skip={begin} count={end - begin}"
            )
            words += [str(file), str(target / f"{reader}.{index}")]
        processes.append(subprocess.Popen(["sh", "-ec", "\n".join(script), "sh", *words]))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise EngramError(f"dd: expected copies of {files[0].parent}, found a failure")


def _warm(files: Sequence[Path], scratch: Path) -> None:
    """The files in the page cache, and nothing left of the last copies."""
    for copy in scratch.iterdir():
        copy.unlink()
    for file in files:
        with file.open("rb") as opened:
            while opened.read(64 << 20):
                pass


def _count(num_ranks: int) -> str:
    return "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
