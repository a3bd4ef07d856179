# SPDX-License-Identifier: Apache-2.0
"""The run-time environment variables, in the one place that knows them."""

import logging
import os
from pathlib import Path

from trtllm_engram.plugins.errors import InputError

# Every variable and what it does; the README lists the same. The library reads _TABLES itself, in
# hosts with no Python, and the tests' conftest.py reads _REQUIRE.
VARIABLES = {
    "TRTLLM_ENGRAM_TABLES": "TOML file that binds table names to stores, for hosts with no Python",
    "TRTLLM_ENGRAM_LOG": "log level: debug, info, warning or error (default: warning)",
    "TRTLLM_ENGRAM_CACHE": "cache folder (default: $XDG_CACHE_HOME/trtllm-engram)",
    "TRTLLM_ENGRAM_REQUIRE": "tests only: parts whose tests must not be skipped",
}

_LOG_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def log_level() -> int:
    """Level of the logger `trtllm_engram` as $TRTLLM_ENGRAM_LOG wants it, a number of `logging`."""
    name = os.environ.get("TRTLLM_ENGRAM_LOG") or "warning"
    level = _LOG_LEVELS.get(name.lower())
    if level is None:
        raise InputError(
            f"TRTLLM_ENGRAM_LOG: expected one of {', '.join(_LOG_LEVELS)}, found {name!r}"
        )
    return level


def cache_dir() -> Path | None:
    """The cache folder, made if missing; None, for working uncached, where it cannot be used."""
    try:
        path = _cache_path()
        path.mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.R_OK | os.W_OK | os.X_OK)
    except (OSError, ValueError, RuntimeError):  # unwritable, a NUL in the name, no home folder
        return None
    return path if usable else None


def _cache_path() -> Path:
    own = os.environ.get("TRTLLM_ENGRAM_CACHE")
    if own:
        return Path(own)
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification has relative paths ignored.
    root = shared if shared.is_absolute() else Path.home() / ".cache"
    return root / "trtllm-engram"
