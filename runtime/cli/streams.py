# SPDX-License-Identifier: Apache-2.0
"""Standard streams as a shell may leave them: closed, or of an encoding that holds few letters."""

from __future__ import annotations

import codecs
import io
import os
import sys

_ESCAPED = "trtllm_engram.escaped"
_MODES = ("r", "w", "w")


def set_up_streams() -> None:
    """Makes all three usable: a closed one leads nowhere, and no text is too much for the others.

    A closed stream's number would go to the next file that is opened, and what is meant for the
    stream into that file.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) < len(_MODES):
        pass
    os.close(handle)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, _MODES[number], encoding="utf-8"))  # noqa: PTH123, SIM115
    codecs.register_error(_ESCAPED, _escape)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ESCAPED)


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    """Bytes of file names that are no text pass as they came, other letters are escaped."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.lookup_error("backslashreplace")(error)
