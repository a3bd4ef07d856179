# SPDX-License-Identifier: Apache-2.0
"""Files of users: found safely, written whole or not at all, failures told in one line."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from trtllm_engram.plugins.errors import InputError

_MOST_BYTES = 256 << 20  # tokenizers have 20 MB, a true size manifest 0.2


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns failures to read into one line that names the file."""
    with _told(path, "read"):
        yield


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns failures to write into one line that names the file."""
    with _told(path, "write"):
        yield


@contextlib.contextmanager
def _told(path: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise _failure(path, verb, error) from error


def _failure(path: Path, verb: str, error: OSError | ValueError) -> InputError:
    reason = getattr(error, "strerror", None) or error
    if getattr(error, "errno", None) == errno.ENOSPC and path.parent.exists():
        reason = f"disk full: free {free_bytes(path.parent)} bytes"
    return InputError(f"{path}: cannot {verb}: {reason}")


def resolve_member(root: Path, name: str) -> Path:
    """root/name, where name comes from outside: relative, without `..`, NUL or `.`-only."""
    pure = PurePosixPath(name)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in name:
        raise InputError(f"{root}: expected a relative file name without '..', found {name!r}")
    return root / pure


def stat_regular(path: Path) -> os.stat_result:
    """The status of a regular file, symlinks followed (a hub cache is made of them)."""
    with reading(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: expected a regular file")
    return status


def read_regular(path: Path) -> bytes:
    """The content of a regular file of no great size: a pipe would keep the reader waiting for
    ever, and a shard of a checkpoint would fill the memory."""
    size = stat_regular(path).st_size
    if size > _MOST_BYTES:
        raise InputError(f"{path}: expected at most {_MOST_BYTES} bytes, found {size}")
    with reading(path):
        return path.read_bytes()


def refuse_to_replace(path: Path, files: Iterable[Path]) -> None:
    """Refuses an output that is one of these files, by whatever name or link."""
    with writing(path):
        if not path.exists():
            return
        for file in files:
            if file.exists() and file.samefile(path):
                raise InputError(f"{path}: expected another file for the output: this one is read")


@contextlib.contextmanager
def write_aside(path: Path) -> Iterator[Path]:
    """Yields the name of an empty scratch file beside path; on success it becomes path, durably, in
    one step.

    A path that cannot be written is refused before the caller's work begins, which may take long.
    """
    scratch = _make_scratch(path)
    try:
        try:
            yield scratch
        except OSError as error:  # not ValueError: what a bug raises would pass for bad input
            raise _failure(path, "write", error) from error
        with writing(path):
            sync(scratch)
            scratch.replace(path)
            sync(path.parent)
    finally:
        with contextlib.suppress(OSError):  # none there, or a disk that can be read only
            scratch.unlink()


def check_writable(path: Path) -> None:
    """Refuses what write_aside would refuse."""
    _make_scratch(path).unlink()


def _make_scratch(path: Path) -> Path:
    with writing(path):
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: expected a file to write, found a folder or a device")
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        scratch.touch()
    return scratch


def missing_folders(path: Path) -> list[Path]:
    """Of path and the folders above it those that are not there, innermost first."""
    with writing(path):
        return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Removes folders, innermost first, up to the first that holds something by now."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """A new or empty folder, which a failure leaves as it was."""
    made = missing_folders(path)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise InputError(f"{path}: expected a new or empty folder, found files in it")
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for child in path.iterdir():
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        remove_empty(made)
        raise


def sync(path: Path) -> None:
    """Puts a file, or a folder's names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_at(handle: int, data: bytes | memoryview, offset: int) -> None:
    """pwrite that does not stop half-way."""
    view = memoryview(data)
    while view:
        count = os.pwrite(handle, view, offset)
        view = view[count:]
        offset += count


def check_free_bytes(folder: Path, needed: int) -> None:
    """Refuses to begin what the disk cannot hold."""
    with writing(folder):
        free = free_bytes(folder)
    if needed > free:
        raise InputError(f"{folder}: disk full: needed {needed} bytes, free {free} bytes")


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write to the folder's disk."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
