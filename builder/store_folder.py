# SPDX-License-Identifier: Apache-2.0
"""The folder that prepare writes into: its names, who may write it, and how it is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trtllm_engram.builder.checkpoint import TOKENIZER_FILE
from trtllm_engram.builder.files import missing_folders, reading, remove_empty, writing
from trtllm_engram.builder.manifest import MANIFEST_FILE
from trtllm_engram.plugins.errors import InputError

TOKEN_MAP_FILE = "token_map.npy"
WEIGHTS_FILE = "weights.safetensors"
TABLES_FOLDER = "tables"

_LOCK_FILE = ".lock"
# The manifest first: without it, what is still there is no store.
_OWN_NAMES = (MANIFEST_FILE, TOKEN_MAP_FILE, TOKENIZER_FILE, WEIGHTS_FILE, TABLES_FOLDER)
_SCRATCH_SUFFIX = ".part"


@contextlib.contextmanager
def claimed(store: Path) -> Iterator[None]:
    """Makes the folder and keeps other prepares out; a failure removes all that prepare wrote.

    The lock is the kernel's and ends with its process: a lock file that a kill left behind locks
    nothing.
    """
    made = missing_folders(store)
    try:
        handle = _lock(store)
    except BaseException:
        remove_empty(made)
        raise
    try:
        _remove_scratch(store)  # of a prepare that was killed
        yield
    except BaseException:
        _clear(store)
        raise
    finally:
        # Removed while it is held: whoever opened it meanwhile sees that it is gone and tries
        # again.
        (store / _LOCK_FILE).unlink(missing_ok=True)
        os.close(handle)
        remove_empty(made)  # where there is no store, nor another prepare that has come


def _lock(store: Path) -> int:
    path = store / _LOCK_FILE
    while True:
        with writing(store):
            store.mkdir(parents=True, exist_ok=True)
        _refuse_strangers(store)
        with writing(store):
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # a prepare that failed has removed the folder
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(handle), path.stat()):
                    return handle
            except BlockingIOError:
                os.close(handle)
                raise InputError(f"{store}: another prepare is writing this store") from None
            except FileNotFoundError:
                pass
            os.close(handle)


def _refuse_strangers(store: Path) -> None:
    """Files of others are neither mixed with a store nor put at risk."""
    with reading(store):
        names = sorted(path.name for path in store.iterdir())
    for name in names:
        own = name in (*_OWN_NAMES, _LOCK_FILE) or name.endswith(_SCRATCH_SUFFIX)
        if not own:
            raise InputError(f"{store}: expected a new or empty folder, found {name!r} in it")


def _clear(store: Path) -> None:
    for name in _OWN_NAMES:
        with contextlib.suppress(OSError):
            if name == TABLES_FOLDER:
                shutil.rmtree(store / name)
            else:
                (store / name).unlink()
    _remove_scratch(store)


def _remove_scratch(store: Path) -> None:
    for scratch in store.glob(f".*{_SCRATCH_SUFFIX}"):
        scratch.unlink(missing_ok=True)
