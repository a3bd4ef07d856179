# SPDX-License-Identifier: Apache-2.0
"""Processes of `trtllm-engram tables`, for tests."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from command_line import COMMAND
from waiting import PATIENCE, wait_until


@contextlib.contextmanager
def process(*words: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """`trtllm-engram tables WORDS`, which goes on."""
    argv = [*COMMAND, "tables", *map(str, words)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, **options) as started:
        try:
            yield started
        finally:
            started.kill()


def document(started: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON object that a process prints before it waits."""
    text = ""
    for line in started.stdout:
        text += line
        if line == "}\n":
            return json.loads(text)
    raise AssertionError(f"{text}{started.stderr.read()}")


def ended(started: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = started.communicate(timeout=PATIENCE)
    return started.returncode, out, err


def waits_for_others(group: str) -> None:
    """Until rank 0 of a group listens."""
    wait_until(lambda: group in Path("/proc/net/unix").read_text())
