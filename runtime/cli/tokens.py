# SPDX-License-Identifier: Apache-2.0
"""Options of commands that take tokens (`hash`, `run`): text or ids, spans that are no text."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trtllm_engram.builder.files import reading
from trtllm_engram.plugins.errors import InputError

from ..text import encode, read_text

Ids = npt.NDArray[np.int32]


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="FILE", help="UTF-8 text (- is standard input)")
    source.add_argument(
        "--ids", metavar="FILE", help="token ids: .npy, or text with white space or commas between"
    )
    parser.add_argument(
        "--dead",
        metavar="FROM:TO",
        action="append",
        default=[],
        help="tokens that are no text, such as an image's: sources of no n-gram (repeatable)",
    )


def token_files(args: argparse.Namespace) -> list[Path]:
    """The file that the tokens come from, if it is one: no output may replace it."""
    name = args.ids if args.text is None else args.text
    return [] if name == "-" else [Path(name)]


def read_tokens(
    args: argparse.Namespace, tokenizer_json: Path
) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """(ids, dead mask) as the options say."""
    ids = _read_ids(args.ids) if args.text is None else encode(tokenizer_json, read_text(args.text))
    dead = np.zeros(ids.size, np.bool_)
    for span in args.dead:
        match = re.fullmatch(r"(\d{1,10}):(\d{1,10})", span)
        begin, end = (int(match[1]), int(match[2])) if match else (1, 0)
        if begin > end or end > ids.size:
            raise InputError(
                f"--dead: expected FROM:TO within the {ids.size} tokens, found {span!r}"
            )
        dead[begin:end] = True
    return ids, dead


def _read_ids(path: str) -> Ids:
    array = _load_npy(path) if path.endswith(".npy") else _parse_ids(path)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{path}: expected integers of shape [T], found {array.dtype} {list(array.shape)}"
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= np.iinfo(np.int32).max:
        raise InputError(
            f"{path}: expected ids from 0 to 2147483647, found {array.min()} to {array.max()}"
        )
    return array.astype(np.int32)


def _load_npy(path: str) -> npt.NDArray[np.generic]:
    with reading(Path(path)):
        try:
            loaded: object = np.load(path, allow_pickle=False)
        except EOFError as error:
            raise InputError(f"{path}: expected a .npy file: {error}") from None
    if not isinstance(loaded, np.ndarray):
        raise InputError(f"{path}: expected a .npy file, found an archive")
    return loaded


def _parse_ids(path: str) -> npt.NDArray[np.int64]:
    words = read_text(path).replace(",", " ").split()
    for place, word in enumerate(words):
        if not (word.isascii() and word.isdecimal() and len(word) <= 10):
            raise InputError(f"{path}: expected token ids, found {word[:20]!r} as word {place + 1}")
    return np.array(words, dtype=np.int64)
