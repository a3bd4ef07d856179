# SPDX-License-Identifier: Apache-2.0
"""The Engram part of a Hugging Face config.json."""

import difflib
import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_engram.builder.files import read_regular, reading
from trtllm_engram.plugins.errors import InputError

CONFIG_FILE = "config.json"
SCALE_BLOCK = 32  # values that share a scale (kScaleBlock in row.h)

_INT32_MAX = 2**31 - 1
_MAX_NGRAM_SIZE = 8  # kMaxNgramSize in layout.h
_MAX_HEADS = 256  # far above any model; with _MAX_LAYERS it bounds the search for primes
_MAX_LAYERS = 1024

_ENGRAM_PREFIX = "engram_"

# Field to key in config.json.
_KEYS = {
    "layer_ids": "engram_layer_ids",
    "num_embeddings": "engram_num_embeddings",
    "max_ngram_size": "engram_max_ngram_size",
    "n_heads": "engram_n_heads",
    "head_dim": "engram_head_dim",
    "engram_vocab_size": "engram_vocab_size",
    "compressed_vocab_size": "engram_compressed_vocab_size",
    "pad_token_id": "engram_pad_token_id",
    "hidden_size": "hidden_size",
    "hc_mult": "hc_mult",
    "rms_norm_eps": "rms_norm_eps",
}


@dataclass(frozen=True)
class EngramConfig:
    """Sizes of a model's Engram modules. Any object that exists is valid.

    Errors name the keys of config.json. Widths made of several sizes fit int32 too, because that is
    what the library's arguments hold.
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    n_heads: int
    head_dim: int
    engram_vocab_size: int
    compressed_vocab_size: int
    pad_token_id: int
    hidden_size: int
    hc_mult: int
    rms_norm_eps: float

    @property
    def num_layers(self) -> int:
        """L, the layers that own an Engram module."""
        return len(self.layer_ids)

    @property
    def num_columns(self) -> int:
        """C, the rows that a token reads in each layer."""
        return (self.max_ngram_size - 1) * self.n_heads

    @property
    def row_dim(self) -> int:
        """C*D, the projection's input width."""
        return self.num_columns * self.head_dim

    @property
    def kv_dim(self) -> int:
        """The projection's output width: hc_mult keys, then one value."""
        return (self.hc_mult + 1) * self.hidden_size

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> "EngramConfig":
        """Reads a config.json, or the one in a checkpoint's folder."""
        file = config_file(path)
        content = read_regular(file)
        try:
            data = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{file}: expected JSON: {error}") from error
        return cls.from_dict(data, where=str(file))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "config") -> "EngramConfig":
        """Takes the Engram keys of a parsed config.json. `where` begins the text of errors."""
        try:
            section = _engram_section(data)
            values = {field: section[key] for field, key in _KEYS.items()}
            for field in ("layer_ids", "num_embeddings"):
                if isinstance(values[field], list):
                    values[field] = tuple(values[field])
            return cls(**values)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The keys of config.json with values fit for JSON; from_dict takes them back."""
        values = {key: getattr(self, field) for field, key in _KEYS.items()}
        for key in ("engram_layer_ids", "engram_num_embeddings"):
            values[key] = list(values[key])
        return values

    def __post_init__(self) -> None:
        _check_ints("engram_layer_ids", self.layer_ids, 0)
        if len(set(self.layer_ids)) != len(self.layer_ids):
            raise InputError(
                f"engram_layer_ids: expected each layer once, found {_shown(list(self.layer_ids))}"
            )
        _check_int("number of engram_layer_ids", self.num_layers, 1, _MAX_LAYERS)
        _check_ints("engram_num_embeddings", self.num_embeddings, 1)
        if len(self.num_embeddings) != self.num_layers:
            raise InputError(
                f"engram_num_embeddings: expected one number per layer ({self.num_layers}), "
                f"found {len(self.num_embeddings)}"
            )
        _check_int("engram_max_ngram_size", self.max_ngram_size, 2, _MAX_NGRAM_SIZE)
        _check_int("engram_n_heads", self.n_heads, 1, _MAX_HEADS)
        _check_int("engram_head_dim", self.head_dim, SCALE_BLOCK)
        if self.head_dim % SCALE_BLOCK:
            raise InputError(
                f"engram_head_dim: expected a multiple of {SCALE_BLOCK}, found {self.head_dim}"
            )
        _check_int("engram_vocab_size", self.engram_vocab_size, 1)
        _check_int("engram_compressed_vocab_size", self.compressed_vocab_size, 1)
        _check_int("engram_pad_token_id", self.pad_token_id, 0)
        _check_int("hidden_size", self.hidden_size, 1)
        _check_int("hc_mult", self.hc_mult, 1)
        _check_epsilon("rms_norm_eps", self.rms_norm_eps)
        object.__setattr__(self, "rms_norm_eps", float(self.rms_norm_eps))
        columns = "(engram_max_ngram_size - 1) * engram_n_heads"
        _check_product(f"{columns} * engram_vocab_size", self.num_columns * self.engram_vocab_size)
        _check_product(f"{columns} * engram_head_dim", self.row_dim)
        _check_product("(hc_mult + 1) * hidden_size", self.kv_dim)


def config_file(path: str | os.PathLike[str]) -> Path:
    """path itself, or the config.json in it where it is a folder."""
    file = Path(path)
    with reading(file):
        return file / CONFIG_FILE if file.is_dir() else file


def _engram_section(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object that holds the keys, complete and with no unknown engram_* key.

    The top level comes first, and one engram_* key there means that all must be there: values put
    together from both places belong to no model.
    """
    if not isinstance(data, Mapping):
        raise InputError(f"expected a JSON object, found {_shown(data)}")
    nested = data.get("text_config")
    if not isinstance(nested, Mapping):
        nested = {}
    if not _engram_keys(data) and not _engram_keys(nested):
        raise InputError("expected engram_* keys, found none, nor any under text_config")
    section, place = (data, "") if _engram_keys(data) else (nested, " under text_config")
    for key in _engram_keys(section):
        if key not in _KEYS.values():
            near = difflib.get_close_matches(key, _KEYS.values(), n=1)
            hint = f", the nearest known one is {near[0]}" if near else ""
            raise InputError(f"unknown key {_shown(key)}{place}{hint}")
    for key in _KEYS.values():
        if key not in section:
            other = " (text_config has one, but keys of two places do not mix)"
            raise InputError(f"{key}: missing{place}{other if key in nested else ''}")
    pad_token_id, vocab_size = section["engram_pad_token_id"], section.get("vocab_size")
    if type(pad_token_id) is int and type(vocab_size) is int and pad_token_id >= vocab_size:
        raise InputError(
            f"engram_pad_token_id: expected an id below vocab_size {_shown(vocab_size)}, "
            f"found {_shown(pad_token_id)}"
        )
    return section


def _engram_keys(section: Mapping[str, Any]) -> list[str]:
    return [key for key in section if isinstance(key, str) and key.startswith(_ENGRAM_PREFIX)]


def _check_int(name: str, value: object, low: int, high: int = _INT32_MAX) -> None:
    # A bool is an int to Python, but true is no size.
    if type(value) is not int or not low <= value <= high:
        raise InputError(f"{name}: expected an integer from {low} to {high}, found {_shown(value)}")


def _check_ints(name: str, values: object, low: int) -> None:
    if not isinstance(values, tuple):
        raise InputError(f"{name}: expected a list of integers, found {_shown(values)}")
    for idx, value in enumerate(values):
        _check_int(f"{name}[{idx}]", value, low)


def _check_epsilon(name: str, value: object) -> None:
    # The gate computes in FP32, whose normal numbers end near 1e-38 and 1e38.
    if type(value) not in (int, float) or not 1e-37 <= value <= 1e37:  # type: ignore[operator]
        raise InputError(f"{name}: expected a positive FP32 number, found {_shown(value)}")


def _check_product(name: str, value: int) -> None:
    if value > _INT32_MAX:
        raise InputError(f"{name}: expected at most {_INT32_MAX} (int32), found {value}")


def _shown(value: object) -> str:
    """One short line for any value, as JSON spells it where it can."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return reprlib.repr(value)
