# SPDX-License-Identifier: Apache-2.0
"""The command line as a process, and what it prints."""

import sys

COMMAND = [sys.executable, "-m", "trtllm_engram.runtime.cli"]
TEXT = "1 2 3 a A 7 7 7 pad 12 13 1 2 3 a A"  # what the fixture `files` has in the file text


def only_line(text):
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]
