# SPDX-License-Identifier: Apache-2.0
"""verify: is every byte of a store still what it was when it was prepared?"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from trtllm_engram.builder.block_sums import BLOCK_BYTES, Progress, sum_blocks
from trtllm_engram.builder.files import reading, stat_regular
from trtllm_engram.builder.manifest import (
    MANIFEST_FILE,
    Manifest,
    Part,
    manifest_problem,
    read_manifest,
    write_manifest,
)
from trtllm_engram.plugins.errors import InputError


def verify(
    store: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    restamp: bool = False,
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> list[str]:
    """Reads everything; returns one line for each thing that differs, with file and block.

    restamp: if the sums hold, the files' present time stamps (and the checkpoint's place) become
    the store's.
    """
    path = Path(os.path.abspath(store))  # noqa: PTH100 - resolve() would follow symlinks
    if checkpoint is not None:
        checkpoint = Path(os.path.abspath(checkpoint))  # noqa: PTH100
    manifest = read_manifest(path, checkpoint)
    manifest.check_checkpoint()
    problems = []
    present: list[tuple[str, Part]] = []
    for name, part in manifest.parts():
        problem = _file_problem(manifest, path, part, restamp)
        if problem is None:
            present.append((name, part))
        elif problem not in problems:
            problems.append(problem)
    spans = [manifest.span(path, part) for _, part in present]
    # Stamps of before the sums: what changes meanwhile must not pass as checked.
    restamped = _restamped(manifest, path) if restamp and not problems else None
    sums = sum_blocks(spans, progress=progress, num_threads=num_threads)
    for block in sorted(sums):
        name, part = present[block.span_idx]
        span = spans[block.span_idx]
        if sums[block] != part.block_sums[block.block_idx]:
            begin = span.offset + block.block_idx * BLOCK_BYTES
            problems.append(
                f"{span.file}: block {block.block_idx} of {name} "
                f"(bytes {begin} to {begin + block.nbytes}): expected sum "
                f"{part.block_sums[block.block_idx]}, found {sums[block]}"
            )
    own = manifest_problem(path)
    if own is not None:
        problems.append(own)
    if not problems:
        problems = _fingerprint_problems(manifest, path)
    if restamped is not None and not problems:
        write_manifest(path, restamped)
    return problems


def _file_problem(manifest: Manifest, store: Path, part: Part, restamp: bool) -> str | None:
    """A file that is missing is a difference too, not the end of the check."""
    try:
        return manifest.file_problem(store, part, any_time=restamp)
    except InputError as error:
        if isinstance(error.__cause__, PermissionError):
            raise
        return str(error)


def _fingerprint_problems(manifest: Manifest, store: Path) -> list[str]:
    """What the manifest says of the layout and the token map holds only together."""
    span = manifest.span(store, manifest.token_map)
    with reading(span.file):
        token_map = np.fromfile(span.file, "<i4", span.nbytes // 4, offset=span.offset)
    found = manifest.layout.fingerprint(token_map)
    if found == manifest.fingerprint:
        return []
    return [f"{store / MANIFEST_FILE}: fingerprint: expected {manifest.fingerprint}, found {found}"]


def _restamped(manifest: Manifest, store: Path) -> Manifest:
    def stamped(part: Part) -> Part:
        status = stat_regular(manifest.span(store, part).file)
        return replace(part, file_size=status.st_size, mtime_ns=status.st_mtime_ns)

    return replace(
        manifest,
        token_map=stamped(manifest.token_map),
        tokenizer=stamped(manifest.tokenizer),
        layers={
            layer_id: {name: stamped(part) for name, part in parts.items()}
            for layer_id, parts in manifest.layers.items()
        },
    )
