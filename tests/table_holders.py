# SPDX-License-Identifier: Apache-2.0
"""Processes that say they hold tables, as the library's do, without any table."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

TABLE = {
    "name": "engram_1",
    "store": "/store",
    "layer": 1,
    "content_id": "0" * 32,
    "kind": "memfd",
    "bytes": 1000,
    "huge_bytes": 250,
    "placement": "host",
    "keeper": "",
}
RECORD = {
    "format_version": 1,
    "role": "keeper",
    "name": "mine",
    "rank": 0,
    "size": 1,
    "since": 1_700_000_000,
    "id": "5eed",
    "tables": [TABLE],
}

_PROGRAM = """
import os, signal, sys
number = os.memfd_create("trtllm-engram.tables")
os.write(number, sys.argv[1].encode())
if sys.argv[3]:
    os.setuid(int(sys.argv[3]))
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "stubborn" else signal.SIG_DFL)
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(record: Any = None, *, stubborn: bool = False, user: int | None = None) -> Iterator[int]:
    """A process whose record is this text, or this JSON over RECORD; yields its pid."""
    text = record if isinstance(record, str) else json.dumps(RECORD | (record or {}))
    options = [text, "stubborn" if stubborn else "", "" if user is None else str(user)]
    words = [sys.executable, "-c", _PROGRAM, *options]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
