# SPDX-License-Identifier: Apache-2.0
"""Finds the native library. Importing this package loads nothing."""

from pathlib import Path

from .errors import EngramError

__all__ = ["library_path"]

LIBRARY_NAME = "libtrtllm_engram.so"


def library_path() -> Path:
    """Path of libtrtllm_engram.so, which lies beside this file.

    Raises:
        EngramError: the library was not built.
    """
    path = Path(__file__).resolve().parent / LIBRARY_NAME  # not the link of an editable install
    if not path.is_file():
        raise EngramError(
            f"{path}: expected the library, found no file; build it with `make` in the checkout"
        )
    return path
