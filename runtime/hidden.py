# SPDX-License-Identifier: Apache-2.0
"""Hidden states [tokens, hc_mult, hidden] for the gate to read, outside a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from trtllm_engram.builder import EngramConfig
from trtllm_engram.builder.dtypes import SAFETENSORS, numpy_dtype
from trtllm_engram.builder.files import stat_regular
from trtllm_engram.builder.model import HIDDEN_DTYPES
from trtllm_engram.plugins.errors import InputError

HostArray = npt.NDArray[Any]

# By the file format's names. numpy has no names for some of the others, so they are told by these.
_DTYPES = {SAFETENSORS[name]: numpy_dtype(name) for name in HIDDEN_DTYPES}
_WORD_BYTES = 8


class HiddenSource(Protocol):
    """Hands out the hidden states that enter an Engram layer, tokens start..stop."""

    def __call__(self, layer_id: int, start: int, stop: int) -> HostArray: ...


class SeededHidden:
    """Hidden states by formula, so that any token's can be made without the others.

    With mix() the SplitMix64 step and e = copy * hidden_size + dim, the value is byte e % 8
    (little-endian, signed) of mix(mix(mix(mix(seed) + layer) + token) + e // 8), divided by 64:
    -2 to 1.98, exact in each of HIDDEN_DTYPES.
    """

    def __init__(self, config: EngramConfig, seed: int = 0, dtype: str = "bfloat16") -> None:
        self._shape = (config.hc_mult, config.hidden_size)
        self._seed = np.array([seed % 2**64], dtype=np.uint64)
        self._of_byte = _OF_BYTE.astype(numpy_dtype(dtype))

    def __call__(self, layer_id: int, start: int, stop: int) -> HostArray:
        layer_key = _mix(_mix(self._seed) + np.uint64(layer_id))
        token_keys = _mix(layer_key + np.arange(start, stop, dtype=np.uint64))
        size = self._shape[0] * self._shape[1]
        words = np.arange(-(-size // _WORD_BYTES), dtype=np.uint64)
        random_bytes = _mix(token_keys[:, None] + words).astype("<u8").view(np.int8)[:, :size]
        values = self._of_byte[random_bytes.view(np.uint8)]
        return np.reshape(values, (stop - start, *self._shape))


class FileHidden:
    """Hidden states of a safetensors file: `layers.{i}.hidden`, or one `hidden` for every layer."""

    def __init__(self, path: Path, config: EngramConfig, num_tokens: int) -> None:
        stat_regular(path)  # the library would wait for a pipe for ever
        try:
            self._file = cast(Any, safe_open(path, framework="np"))
        except SafetensorError as error:
            raise InputError(f"{path}: expected a safetensors file: {error}") from None
        names = set(self._file.keys())
        expected = [num_tokens, config.hc_mult, config.hidden_size]
        self._names: dict[int, str] = {}
        for layer_id in config.layer_ids:
            own = f"layers.{layer_id}.hidden"
            name = own if own in names else "hidden"
            if name not in names:
                raise InputError(
                    f"{path}: expected a tensor {own} or hidden, found {sorted(names)}"
                )
            tensor = self._file.get_slice(name)
            shape, dtype = list(tensor.get_shape()), tensor.get_dtype()
            if shape != expected:
                raise InputError(f"{path}: {name}: expected shape {expected}, found {shape}")
            if dtype not in _DTYPES:
                raise InputError(
                    f"{path}: {name}: expected one of {', '.join(_DTYPES)}, found {dtype}"
                )
            self._names[layer_id] = name

    def __call__(self, layer_id: int, start: int, stop: int) -> HostArray:
        tensor = self._file.get_slice(self._names[layer_id])
        if start == stop:  # the library slices no tensor without tokens
            return np.empty((0, *tensor.get_shape()[1:]), _DTYPES[tensor.get_dtype()])
        return np.ascontiguousarray(tensor[start:stop])


_OF_BYTE = np.arange(256, dtype=np.uint8).view(np.int8) / np.float32(64)


def _mix(x: HostArray) -> HostArray:
    """One step of SplitMix64 on uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: HostArray = x ^ (x >> np.uint64(31))
    return mixed
