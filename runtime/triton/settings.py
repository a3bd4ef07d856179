# SPDX-License-Identifier: Apache-2.0
"""What a model's config.pbtxt says of it: its parameters, and which of its instances this is.

store         the store's folder
checkpoint    where its checkpoint lies now, if it was moved
engine        a plan of `build`; default: eager ops
max_tokens    most tokens of a request, and of what runs side by side; with an engine, its own
keeper        which process of `tables serve` to attach to, with table.memory = keeper
table.KEY     KEY of Tables.bind: placement, scales, hot_rows, hot_gib, hot_adaptive, memory, pages,
              numa
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtllm_engram.plugins.errors import InputError

from ..devices import CPU
from ..group import Group

TABLE = "table."
_NUMBERS = (f"{TABLE}hot_gib", f"{TABLE}hot_adaptive")


@dataclass(frozen=True)
class Settings:
    """The parameters, read."""

    store: str
    checkpoint: str | None = None
    engine: str | None = None
    max_tokens: int = 8192
    keeper: str | None = None
    table: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens < 2**31:
            raise InputError(f"max_tokens: expected 1 to {2**31 - 1}, found {self.max_tokens}")

    @classmethod
    def of_parameters(cls, parameters: Mapping[str, str]) -> Settings:
        keys: dict[str, Any] = {name: text for name, text in parameters.items() if text}
        table = {name: keys.pop(name) for name in list(keys) if name.startswith(TABLE)}
        known = cls.__dataclass_fields__.keys() - {"table"}
        for name in keys:
            if name not in known:
                raise InputError(
                    f"parameters: expected {', '.join(sorted(known))} or {TABLE}KEY, found {name!r}"
                )
        if "store" not in keys:
            raise InputError("parameters: expected a store, found none")
        if "max_tokens" in keys:
            keys["max_tokens"] = _number(keys["max_tokens"])
        for name in _NUMBERS:
            if name in table:
                table[name] = _real(name, table[name])
        return cls(table={name[len(TABLE) :]: value for name, value in table.items()}, **keys)

    def parameters(self) -> dict[str, str]:
        """As of_parameters reads them."""
        fields = {name: value for name, value in vars(self).items() if name != "table" and value}
        tables = {f"{TABLE}{name}": value for name, value in self.table.items()}
        return {name: str(value) for name, value in (fields | tables).items()}


@dataclass(frozen=True)
class Instance:
    """One process of a model."""

    device: str  # "cpu" or "cuda:N"
    rank: int  # among the model's instances
    size: int  # their number
    server: int  # the server's process
    model: str
    version: str

    @classmethod
    def of_args(cls, args: Mapping[str, str]) -> Instance:
        """args: what the backend gives to initialize."""
        config = json.loads(args["model_config"])
        group = config["instance_group"][0]
        gpus = [int(gpu) for gpu in group.get("gpus", [])] or [0]
        count = int(group.get("count", 1))
        number = int(args["model_instance_name"].rpartition("_")[2])
        on_gpu = args["model_instance_kind"] == "GPU"
        ordinal = int(args["model_instance_device_id"])
        place = gpus.index(ordinal) if on_gpu else 0
        return cls(
            device=f"cuda:{ordinal}" if on_gpu else CPU,
            rank=place * count + number,
            size=count * len(gpus) if on_gpu else count,
            server=os.getppid(),
            model=args["model_name"],
            version=args["model_version"],
        )

    @property
    def labels(self) -> dict[str, str]:
        """Of this instance's metrics."""
        return {"model": self.model, "version": self.version, "instance": str(self.rank)}

    def table_group(self, keeper: str | None) -> Group:
        """Triton starts all instances of a model together, so they bind as one group."""
        name = f"triton-{self.server}-{self.model}-{self.version}"
        return Group(name, self.rank, self.size, keeper=keeper)


def parameters_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of a model_config, as plain text."""
    return {name: one["string_value"] for name, one in config.get("parameters", {}).items()}


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise InputError(f"max_tokens: expected a number, found {text!r}")
    return int(text)


def _real(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{name}: expected a number, found {text!r}") from None
