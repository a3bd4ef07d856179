# SPDX-License-Identifier: Apache-2.0
"""Checksums of spans of files, block by block in parallel, at the disk's speed in little memory.

A block is 64 MiB of a span, counted from its beginning; the last one is shorter. Its sum is
XXH3-128 (seed 0) in the canonical big-endian form. A root is the XXH3-128 of the sums one after the
other, so it says what the bytes are, wherever they lie.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from trtllm_engram.builder.files import reading
from trtllm_engram.plugins.errors import InputError

BLOCK_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20
_MAX_THREADS = 16  # each holds one chunk: 64 MiB in all

Progress = Callable[[int, int], None]  # (done bytes, total bytes), called in the caller's thread
Sink = Callable[["Block", int, memoryview], None]  # (block, offset in the span, bytes of it)


@dataclass(frozen=True)
class Span:
    """A range of bytes of a file."""

    file: Path
    offset: int
    nbytes: int


class Block(NamedTuple):
    """One block of spans[span_idx]."""

    span_idx: int
    block_idx: int
    nbytes: int


def blocks_of(spans: Sequence[Span]) -> list[Block]:
    """All blocks, in the order in which they lie in the files."""
    return [
        Block(span_idx, begin // BLOCK_BYTES, min(BLOCK_BYTES, span.nbytes - begin))
        for span_idx, span in enumerate(spans)
        for begin in range(0, span.nbytes, BLOCK_BYTES)
    ]


def num_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)


def sum_root(sums: Iterable[str]) -> str:
    """The root of block sums in hex, in hex."""
    return xxhash.xxh3_128(b"".join(bytes.fromhex(text) for text in sums)).hexdigest()


def sums_by_span(spans: Sequence[Span], sums: Mapping[Block, str]) -> list[tuple[str, ...]]:
    """The sums of each span, in order."""
    by_span: list[list[str]] = [[] for _ in spans]
    for block in sorted(sums):
        by_span[block.span_idx].append(sums[block])
    return [tuple(texts) for texts in by_span]


def sum_blocks(
    spans: Sequence[Span],
    blocks: Sequence[Block] | None = None,
    *,
    sink: Sink | None = None,
    on_block: Callable[[Block, str], None] | None = None,
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> dict[Block, str]:
    """Sums of the blocks (default: all).

    sink sees every byte on its way, in the workers' threads; on_block and progress are called in
    this one, block after block as they are done.
    """
    blocks = blocks_of(spans) if blocks is None else blocks
    total = sum(block.nbytes for block in blocks)
    done = 0
    sums = {}
    stop = threading.Event()
    buffers = threading.local()

    def sum_block(block: Block) -> str:
        if not hasattr(buffers, "chunk"):
            buffers.chunk = memoryview(mmap.mmap(-1, _CHUNK_BYTES))
        digest = xxhash.xxh3_128()
        for position, data in _chunks(spans[block.span_idx], block, buffers.chunk):
            if stop.is_set():
                break
            digest.update(data)  # releases the GIL, as preadv does
            if sink is not None:
                sink(block, position, data)
        return digest.hexdigest()

    with ThreadPoolExecutor(num_threads or _default_threads()) as pool:
        futures = {pool.submit(sum_block, block): block for block in blocks}
        try:
            if progress is not None:
                progress(done, total)
            for future in as_completed(futures):
                block = futures[future]
                sums[block] = future.result()
                if on_block is not None:
                    on_block(block, sums[block])
                done += block.nbytes
                if progress is not None:
                    progress(done, total)
        except BaseException:  # Ctrl-C too: leave at the next chunk, not after the last block
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sums


def shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Progress of one step of several: `before` bytes are done when it begins, out of `total`."""
    if progress is None:
        return None
    return lambda done, _: progress(before + done, total)


def _chunks(span: Span, block: Block, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(offset in the span, bytes) over the block. A handle per block gives each thread its own
    read-ahead.
    """
    position = block.block_idx * BLOCK_BYTES
    end = position + block.nbytes
    with reading(span.file):
        handle = os.open(span.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(handle, span.offset + position, block.nbytes, os.POSIX_FADV_SEQUENTIAL)
        while position < end:
            with reading(span.file):
                room = buffer[: min(len(buffer), end - position)]
                count = os.preadv(handle, [room], span.offset + position)
            if count == 0:
                raise InputError(
                    f"{span.file}: ends before byte {span.offset + end}: changed while it was read"
                )
            yield position, buffer[:count]
            position += count
    finally:
        os.close(handle)


def _default_threads() -> int:
    # Two for each core: one reads while the other sums.
    return min(_MAX_THREADS, 2 * len(os.sched_getaffinity(0)))
