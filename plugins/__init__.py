# SPDX-License-Identifier: Apache-2.0
"""Finds and opens the native library. Importing this package loads nothing."""

import ctypes
from pathlib import Path

from .errors import EngramError

__all__ = ["ABI_VERSION", "library_path", "open_library"]

ABI_VERSION = 1  # ENGRAM_ABI_VERSION in engram.h
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


def open_library(path: str) -> ctypes.CDLL:
    """The library at this path, once its ABI is known to be the one that this package speaks.

    Raises:
        EngramError: it cannot be loaded, or is of another ABI.
    """
    try:
        library = ctypes.CDLL(path)
        library.engram_abi_version.restype = ctypes.c_int32
        library.engram_abi_version.argtypes = []
        found = library.engram_abi_version()
    except (OSError, AttributeError) as error:
        raise EngramError(f"{path}: cannot be loaded: {error}") from None
    # Before any other symbol is looked up: a library of another ABI may lack some.
    if found != ABI_VERSION:
        raise EngramError(
            f"{path}: expected ABI {ABI_VERSION}, found ABI {found}: "
            "library and Python code are of different versions, reinstall trtllm-engram"
        )
    return library
