# SPDX-License-Identifier: Apache-2.0
"""Model repositories of Triton Inference Server: REPOSITORY/NAME/config.pbtxt and NAME/1/.

A model of the python form takes, for each row of a batch, `text` or `token_ids` and, where residual
streams are to be made, `layers.{i}.hidden` of every layer. A batch's first dimension B is not in
the shapes below; N is the highest n-gram order.

text                   STRING [1], of a batch of one, or
token_ids              INT32 [T]
lookback_ids           INT32 [N-1], the tokens before those, nearest first; -1, the default: none
position               INT64 [1], of the first of them in its text; default 0
layers.{i}.hidden      [T, hc_mult, hidden]
hash_ids               INT32 [T, L, C]
layers.{i}.rows        BF16 [T, C*D]
layers.{i}.hidden_out  like layers.{i}.hidden
next_lookback_ids      INT32 [N-1]

With sequences, Triton's sequence ids say which text a request goes on with: the server keeps each
text's past, and lookback_ids, position and next_lookback_ids are not there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.files import new_folder, sync, writing
from trtllm_engram.builder.model import HIDDEN_DTYPES, hidden_name, hidden_out_name, rows_name
from trtllm_engram.builder.pbtxt import Word, to_pbtxt
from trtllm_engram.plugins.errors import InputError

CONFIG_FILE = "config.pbtxt"
TYPES = dict(zip(HIDDEN_DTYPES, ("TYPE_BF16", "TYPE_FP16", "TYPE_FP32"), strict=True))
MODEL_PY = '''\
# SPDX-License-Identifier: Apache-2.0
"""Engram in Triton's Python backend; config.pbtxt has its inputs, outputs and parameters."""

from trtllm_engram.runtime.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
# A sequence that nobody goes on with for so long is forgotten.
_IDLE_MICROSECONDS = 600 * 10**6
_MAX_SEQUENCES = 1024

Message = dict[str, Any]


@dataclass(frozen=True)
class Serving:
    """How a model is served.

    gpus: instances run on each of these; none: on the CPU.
    instances: on each GPU, or on the CPU; they share one table.
    max_batch: most requests, or rows of requests, that run side by side.
    sequences: the server keeps each text's past.
    text: requests may bring text.
    parameters: the model's own, by name (runtime.triton.settings).
    """

    gpus: Sequence[int] = ()
    instances: int = 1
    max_batch: int = 64
    sequences: bool = False
    text: bool = True
    hidden_dtype: str = "bfloat16"
    parameters: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("instances", "max_batch"):
            if not 1 <= getattr(self, key) < 2**31:
                raise InputError(f"{key}: expected 1 to {2**31 - 1}, found {getattr(self, key)}")

    def instance_group(self) -> Message:
        kind = Word("KIND_GPU" if self.gpus else "KIND_CPU")
        gpus = {"gpus": list(self.gpus)} if self.gpus else {}
        return {"kind": kind, "count": self.instances, **gpus}


def python_config(config: EngramConfig, serving: Serving) -> Message:
    """config.pbtxt of the python form for a store's model."""
    window = [config.max_ngram_size - 1]
    hidden = TYPES[serving.hidden_dtype]
    residual = [-1, config.hc_mult, config.hidden_size]
    inputs = [_input("text", "TYPE_STRING", [1])] if serving.text else []
    inputs.append(_input("token_ids", "TYPE_INT32", [-1]))
    if not serving.sequences:
        inputs.append(_input("lookback_ids", "TYPE_INT32", window))
        inputs.append(_input("position", "TYPE_INT64", [1]))
    inputs += [_input(hidden_name(layer), hidden, residual) for layer in config.layer_ids]
    columns = [-1, config.num_layers, config.num_columns]
    outputs = [tensor("hash_ids", "TYPE_INT32", columns)]
    for layer in config.layer_ids:
        outputs.append(tensor(rows_name(layer), "TYPE_BF16", [-1, config.row_dim]))
        outputs.append(tensor(hidden_out_name(layer), hidden, residual))
    if not serving.sequences:
        outputs.append(tensor("next_lookback_ids", "TYPE_INT32", window))
    return {
        "backend": "python",
        "max_batch_size": serving.max_batch,
        "input": inputs,
        "output": outputs,
        "instance_group": [serving.instance_group()],
        **(sequence_batching() if serving.sequences else {"dynamic_batching": {}}),
        "parameters": parameters(serving.parameters),
    }


def write_model(
    repository: str | os.PathLike[str],
    name: str,
    config: Message,
    files: Mapping[str, bytes],
    links: Mapping[str, Path] | None = None,
) -> Path:
    """Writes repository/name, a new model with these files, and links to others, by their paths in
    its folder ("1" is its version), whole or not at all; config.pbtxt comes last."""
    if name in ("", ".", "..") or any(sign in name for sign in "/\0"):
        raise InputError(f"--name: expected a folder's name, found {name!r}")
    folder = Path(repository) / name
    with new_folder(folder), writing(folder):
        for path, content in files.items():
            file = folder / path
            file.parent.mkdir(exist_ok=True)
            file.touch(mode=0o644)  # the tables' file may be written by its owner alone
            file.write_bytes(content)
            sync(file)
        for path, target in (links or {}).items():
            (folder / path).symlink_to(target)
        (folder / CONFIG_FILE).write_text(to_pbtxt(config), encoding="utf-8")
        sync(folder / CONFIG_FILE)
        sync(folder)
    return folder


def tensor(name: str, data_type: str, dims: list[int]) -> Message:
    """An input, or an output."""
    return {"name": name, "data_type": Word(data_type), "dims": dims}


def _input(name: str, data_type: str, dims: list[int]) -> Message:
    """An input that requests may leave out, and whose sizes differ between those of a batch."""
    ragged = {"allow_ragged_batch": True} if -1 in dims else {}
    return tensor(name, data_type, dims) | ragged | {"optional": True}


def sequence_batching(**others: Any) -> Message:
    """The field of models that keep sequences."""
    return {
        "sequence_batching": {
            "max_sequence_idle_microseconds": _IDLE_MICROSECONDS,
            "oldest": {"max_candidate_sequences": _MAX_SEQUENCES},
            **others,
        }
    }


def parameters(values: Mapping[str, str]) -> list[Message]:
    """The field of a model's own parameters."""
    return [{"key": key, "value": {"string_value": value}} for key, value in sorted(values.items())]
