# SPDX-License-Identifier: Apache-2.0
"""Text files and tokenizers of users."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.files import reading
from trtllm_engram.builder.token_map import load_tokenizer
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
    tokenizer = load_tokenizer(tokenizer_json)
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def encode_all(tokenizer_json: Path, texts: list[str]) -> list[npt.NDArray[np.int32]]:
    """The same of several texts, on all cores."""
    encoded = load_tokenizer(tokenizer_json).encode_batch(texts, add_special_tokens=False)
    return [np.array(one.ids, dtype=np.int32) for one in encoded]
