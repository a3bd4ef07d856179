# SPDX-License-Identifier: Apache-2.0
"""The object `engram` in the config.json of a TensorRT-LLM checkpoint.

format_version      1
base_architecture   architecture of the decoder that the layers were added to
history             where the tokens before a call come from: a key of HISTORIES
fingerprint         of the tables' layout (engram.json of the store)
tables              layer id, as a text, to the name that its table has at run time
weight_layout       of the projection's weight in the rank files: one of weight_layout.LAYOUTS
projection_ranks    1: each rank projects alone; else as many as share a tensor, each its columns
config              the Engram keys of the model's config.json
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.weight_layout import LAYOUTS, ROW_MAJOR
from trtllm_engram.plugins.errors import InputError

FORMAT_VERSION = 1
ARCHITECTURE = "EngramForCausalLM"
HISTORIES = {
    "explicit": "inputs engram_cu_seqlens and engram_lookback_ids, output engram_next_lookback_ids",
    "kv_phantom": "the KV cache of TensorRT-LLM's executor, in one more layer of one head",
    "whole_prompt": "input engram_cu_seqlens; every call has whole prompts, and no KV cache",
}
# Parameters of the model, without the layer's own prefix.
TOKEN_MAP = "engram.token_map"
LAYER_TENSORS = ("words", "scales", "query", "key")
_KEYS = (
    "format_version",
    "base_architecture",
    "history",
    "fingerprint",
    "tables",
    "weight_layout",
    "projection_ranks",
    "config",
)


@dataclass(frozen=True)
class EngramSection:
    """What a build needs to know of a store, beside its weights."""

    base_architecture: str
    history: str
    fingerprint: str
    tables: Mapping[int, str]
    config: EngramConfig
    weight_layout: str = ROW_MAJOR
    projection_ranks: int = 1

    def __post_init__(self) -> None:
        if self.history not in HISTORIES:
            raise InputError(
                f"engram.history: expected one of {', '.join(HISTORIES)}, found {self.history!r}"
            )
        if tuple(self.tables) != self.config.layer_ids:
            raise InputError(
                f"engram.tables: expected a name for each layer of "
                f"{list(self.config.layer_ids)}, found {list(self.tables)}"
            )
        if self.weight_layout not in LAYOUTS:
            raise InputError(
                f"engram.weight_layout: expected one of {', '.join(LAYOUTS)}, found "
                f"{self.weight_layout!r}"
            )
        if type(self.projection_ranks) is not int or self.projection_ranks < 1:
            raise InputError(
                f"engram.projection_ranks: expected 1 or more, found {self.projection_ranks!r}"
            )

    @classmethod
    def from_dict(cls, data: object) -> EngramSection:
        if not isinstance(data, Mapping) or set(data) != set(_KEYS):
            found = sorted(data) if isinstance(data, Mapping) else data
            raise InputError(f"engram: expected an object with {', '.join(_KEYS)}; found {found}")
        if data["format_version"] != FORMAT_VERSION:
            raise InputError(
                f"engram.format_version: expected {FORMAT_VERSION}, found {data['format_version']}"
            )
        names = data["tables"]
        if not isinstance(names, Mapping) or not all(str(key).isdecimal() for key in names):
            raise InputError(f"engram.tables: expected names by layer, found {names!r}")
        return cls(
            base_architecture=str(data["base_architecture"]),
            history=str(data["history"]),
            fingerprint=str(data["fingerprint"]),
            tables={int(layer_id): str(name) for layer_id, name in names.items()},
            weight_layout=str(data["weight_layout"]),
            projection_ranks=data["projection_ranks"],
            config=EngramConfig.from_dict(data["config"], where="engram.config"),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "base_architecture": self.base_architecture,
            "history": self.history,
            "fingerprint": self.fingerprint,
            "tables": {str(layer_id): name for layer_id, name in self.tables.items()},
            "weight_layout": self.weight_layout,
            "projection_ranks": self.projection_ranks,
            "config": self.config.to_dict(),
        }


def layer_prefix(layer_id: int) -> str:
    """Of a layer's parameters. No name here has a part that preprocessing of quantised checkpoints
    takes for one of its own: fc, gate, proj, qkv, dense, or `weight` at the end."""
    return f"engram.layer_{layer_id}"
