# SPDX-License-Identifier: Apache-2.0
"""prepare's passes over files against `cat` and `cp`, each run with a cold page cache."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np

from trtllm_engram.builder.block_sums import Span, sum_blocks
from trtllm_engram.builder.copy import copy_spans
from trtllm_engram.builder.files import check_free_bytes, writing
from trtllm_engram.plugins.errors import EngramError

from .measure import Measurement, median_seconds

_TURNS = 3
_TARGET = 0.8
_CHUNK_BYTES = 64 << 20


def bench_files(folder: Path, file_bytes: int) -> list[Measurement]:
    """Measures the disk of `folder`, with a file of random bytes and copies of it there."""
    check_free_bytes(folder, 2 * file_bytes)
    source = folder / "source"
    _write_random(source, file_bytes)
    span = Span(source, 0, file_bytes)
    cat, sums = median_seconds(
        [lambda _: _shell('cat "$1" > /dev/null', source), lambda _: sum_blocks([span])],
        _TURNS,
        before=lambda: _drop_from_cache(source),
    )
    cp, copies = median_seconds(
        [
            lambda turn: _shell(
                'cp --reflink=never "$1" "$2" && sync "$2"', source, folder / f"cp{turn}"
            ),
            lambda turn: copy_spans(folder / f"copy{turn}", [span], ["copy"]),
        ],
        _TURNS,
        before=lambda: _remove_copies(folder, source),
    )
    return [
        Measurement("prepare, checksums", file_bytes / sums, "B", "cat", file_bytes / cat, _TARGET),
        Measurement(
            "prepare --copy", file_bytes / copies, "B", "cp, sync", file_bytes / cp, _TARGET
        ),
    ]


def _write_random(path: Path, num_bytes: int) -> None:
    rng = np.random.default_rng(0)
    with writing(path), path.open("wb") as file:
        for begin in range(0, num_bytes, _CHUNK_BYTES):
            file.write(rng.bytes(min(_CHUNK_BYTES, num_bytes - begin)))


def _remove_copies(folder: Path, source: Path) -> None:
    """Each writer begins with the same free space and a cold source."""
    for file in [*folder.glob("cp*"), *folder.glob("copy*/*")]:
        if file.is_file():
            file.unlink()
    _drop_from_cache(source)


def _drop_from_cache(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)  # dirty pages stay whatever is advised
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _shell(script: str, *paths: Path) -> None:
    command = ["sh", "-c", script, "sh", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngramError(f"{script}: {done.stderr.strip()}")
