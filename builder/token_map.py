# SPDX-License-Identifier: Apache-2.0
"""The token map: raw token id to compressed id, made from a tokenizer.json as engram.md says.

Making it takes a second or two, so maps are kept in the cache folder. An entry's name is the digest
of all that the map follows from, and an entry begins with the digest of its own content: time
stamps say nothing, and a broken entry is made anew.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Regex, Tokenizer, normalizers

from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.files import read_regular, write_aside
from trtllm_engram.plugins import env
from trtllm_engram.plugins.errors import InputError

# Raise the number with any change of the rule. The library's version stands for its Unicode tables.
_RULE = f"token map 1, tokenizers {tokenizers.__version__}"
_DIGEST_BYTES = hashlib.sha256().digest_size
_UNDECODABLE = "\ufffd"  # decoding's sign for an id that is no whole UTF-8 sequence
_LONE_SPACE = "\ue000"  # private character that carries a lone space past Strip


def build_token_map(
    tokenizer_json: str | os.PathLike[str], config: EngramConfig
) -> npt.NDArray[np.int32]:
    """The map of a tokenizer.json, int32 [vocab]; refuses a tokenizer that the config rules out."""
    path = Path(tokenizer_json)
    token_map = load_token_map(path)
    compressed_size = int(token_map.max(initial=-1)) + 1
    if compressed_size != config.compressed_vocab_size:
        raise InputError(
            f"{path}: expected {config.compressed_vocab_size} compressed ids "
            f"(engram_compressed_vocab_size), found {compressed_size}"
        )
    if config.pad_token_id >= token_map.size:
        raise InputError(
            f"engram_pad_token_id: expected an id below {token_map.size}, the size of the "
            f"vocabulary of {path}, found {config.pad_token_id}"
        )
    return token_map


def load_token_map(path: Path) -> npt.NDArray[np.int32]:
    """The map of any tokenizer.json, from the cache where it is there."""
    content = read_regular(path)
    entry = _cache_entry(content)
    token_map = None if entry is None else _read_entry(entry)
    if token_map is None:
        token_map = _make_token_map(content, path)
        if entry is not None:
            _write_entry(entry, token_map)
    return token_map


def token_map_digest(token_map: npt.NDArray[np.int32]) -> str:
    """SHA-256, in hex, of the map as little-endian int32."""
    return hashlib.sha256(_to_bytes(token_map)).hexdigest()


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json."""
    content = read_regular(path)
    with _tokenizer_of(path):
        return Tokenizer.from_buffer(content)


@contextlib.contextmanager
def _tokenizer_of(path: Path) -> Iterator[None]:
    """Turns what the library says of a file into one line that names it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the library is no Exception
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: expected a tokenizer.json: {reason}") from error


def _make_token_map(content: bytes, path: Path) -> npt.NDArray[np.int32]:
    with _tokenizer_of(path):
        keys = _compression_keys(Tokenizer.from_buffer(content))
    compressed_ids: dict[str, int] = {}  # numbered by first appearance
    ids = [compressed_ids.setdefault(key, len(compressed_ids)) for key in keys]
    return np.array(ids, dtype=np.int32)


def _compression_keys(tokenizer: Tokenizer) -> list[str]:
    """What each raw id is compared by: ids of equal keys share a compressed id."""
    vocab = tokenizer.get_vocab()
    tokens = {token_id: token for token, token_id in vocab.items()}
    if set(tokens) != set(range(len(vocab))):
        raise InputError(f"the ids of its {len(vocab)} tokens are not 0 to {len(vocab) - 1}")
    normalizer = _make_normalizer()
    keys = []
    # One by one: decode_batch takes longer, and its threads make a later fork complain.
    for token_id in range(len(vocab)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if _UNDECODABLE in text:
            keys.append(tokens[token_id])
        else:
            keys.append(normalizer.normalize_str(text) or text)
    return keys


def _make_normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def _cache_entry(content: bytes) -> Path | None:
    folder = env.cache_dir()
    if folder is None:
        return None
    key = hashlib.sha256(_RULE.encode() + b"\0" + content).hexdigest()
    return folder / f"token_map-{key}.bin"


def _read_entry(entry: Path) -> npt.NDArray[np.int32] | None:
    """The map in a cache entry, or None where there is none that is whole."""
    try:
        stored = entry.read_bytes()
    except OSError:
        return None
    digest, values = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if hashlib.sha256(values).digest() != digest or len(values) % 4:
        return None
    return np.frombuffer(values, dtype="<i4").astype(np.int32)


def _write_entry(entry: Path, token_map: npt.NDArray[np.int32]) -> None:
    """Puts a map into the cache in one step, whoever else writes it; a failure costs only time."""
    values = _to_bytes(token_map)
    with contextlib.suppress(InputError), write_aside(entry) as scratch:
        scratch.write_bytes(hashlib.sha256(values).digest() + values)


def _to_bytes(token_map: npt.NDArray[np.int32]) -> bytes:
    return token_map.astype("<i4").tobytes()
