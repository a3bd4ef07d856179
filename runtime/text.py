# SPDX-License-Identifier: Apache-2.0
"""Text files and tokenizers of users."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from trtllm_engram.builder.files import read_regular, reading
from trtllm_engram.plugins.errors import InputError


def read_text(path: str) -> str:
    """A UTF-8 file's text, as it is; "-" is standard input."""
    with reading(Path(path)):
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: expected UTF-8 text: {error.reason} at byte {error.start}"
        ) from None


def encode(tokenizer_json: Path, text: str) -> npt.NDArray[np.int32]:
    """Token ids of a text, with nothing added before or after it."""
    content = read_regular(tokenizer_json)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the library is no Exception
        raise InputError(f"{tokenizer_json}: expected a tokenizer.json: {error}") from None
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
