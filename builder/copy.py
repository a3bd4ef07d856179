# SPDX-License-Identifier: Apache-2.0
"""prepare --copy: a checkpoint's tables as files of the store, at the disk's speed, resumable after
a kill.

Each part becomes one file of its raw bytes, so that it begins at a page. While they are written, a
journal beside them holds the sources' time stamps and the sum of each block that was written. After
a kill, the blocks that the journal names are read back, and only those whose sum holds are kept:
nothing depends on what reached the disk when.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from trtllm_engram.builder.block_sums import Block, Progress, Span, blocks_of, shifted, sum_blocks
from trtllm_engram.builder.files import check_free_bytes, reading, sync, write_at, writing

_JOURNAL = "journal.jsonl"
_FORMAT = "trtllm-engram copy 1"


def copy_spans(
    folder: Path,
    sources: Sequence[Span],
    names: Sequence[str],
    *,
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> dict[Block, str]:
    """Writes folder/names[i] from sources[i]; returns the sums of all blocks."""
    with writing(folder):
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():  # of another checkpoint's copy that was killed
            if path.name not in (*names, _JOURNAL):
                path.unlink()
    copies = [
        Span(folder / name, 0, source.nbytes) for name, source in zip(names, sources, strict=True)
    ]
    blocks = blocks_of(sources)
    total = sum(block.nbytes for block in blocks)
    journal = folder / _JOURNAL
    head = json.dumps([_FORMAT, [_identity(source) for source in sources], list(names)])
    sums = _finished_blocks(journal, head, copies, blocks, num_threads, progress)
    kept = sum(block.nbytes for block in sums)
    check_free_bytes(folder, total - sum(_allocated_bytes(copy.file) for copy in copies))
    with contextlib.ExitStack() as stack:
        handles = []
        for copy in copies:
            with writing(copy.file):
                handle = os.open(copy.file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                stack.callback(os.close, handle)
                os.ftruncate(handle, copy.nbytes)
            handles.append(handle)
        with writing(journal):
            lines = stack.enter_context(journal.open("w", encoding="ascii", buffering=1))
            lines.write(head + "\n")

        def write_down(block: Block, text: str) -> None:
            with writing(journal):
                lines.write(json.dumps([*block, text]) + "\n")

        def write_copy(block: Block, position: int, data: memoryview) -> None:
            with writing(copies[block.span_idx].file):
                write_at(handles[block.span_idx], data, position)

        for block, text in sums.items():
            write_down(block, text)
        sums |= sum_blocks(
            sources,
            [block for block in blocks if block not in sums],
            sink=write_copy,
            on_block=write_down,
            progress=shifted(progress, kept, total),
            num_threads=num_threads,
        )
        for source, copy, handle in zip(sources, copies, handles, strict=True):
            with writing(copy.file):
                # As cp --preserve: a second prepare can tell by it whether the source is still the
                # same.
                os.utime(handle, ns=(_mtime_ns(source.file),) * 2)
                os.fsync(handle)
    with writing(journal):
        sync(folder)
    return sums


def remove_journal(folder: Path) -> None:
    """To be called once the store is whole."""
    (folder / _JOURNAL).unlink(missing_ok=True)


def _finished_blocks(
    journal: Path,
    head: str,
    copies: Sequence[Span],
    blocks: Sequence[Block],
    num_threads: int | None,
    progress: Progress | None,
) -> dict[Block, str]:
    """Blocks that an earlier run has written and that are still whole, with their sums."""
    noted = _read_journal(journal, head)
    candidates = [
        block
        for block in blocks
        if block in noted and _size(copies[block.span_idx].file) == copies[block.span_idx].nbytes
    ]
    total = sum(block.nbytes for block in blocks)
    found = sum_blocks(
        copies,
        candidates,
        progress=shifted(progress, 0, total),
        num_threads=num_threads,
    )
    return {block: text for block, text in found.items() if text == noted[block]}


def _read_journal(journal: Path, head: str) -> dict[Block, str]:
    """Empty where there is none, or one of other sources. The last line may be torn."""
    if not journal.exists():
        return {}
    with reading(journal):
        lines = journal.read_text(encoding="ascii", errors="replace").splitlines()
    noted: dict[Block, str] = {}
    if lines[:1] != [head]:
        return noted
    for line in lines[1:]:
        try:
            span_idx, block_idx, nbytes, text = json.loads(line)
            noted[Block(span_idx, block_idx, nbytes)] = text
        except (ValueError, TypeError):
            continue
    return noted


def _identity(span: Span) -> list[str | int]:
    with reading(span.file):
        status = span.file.stat()
    return [str(span.file), status.st_size, status.st_mtime_ns, span.offset, span.nbytes]


def _mtime_ns(file: Path) -> int:
    with reading(file):
        return file.stat().st_mtime_ns


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1


def _allocated_bytes(file: Path) -> int:
    return file.stat().st_blocks * 512 if file.is_file() else 0
