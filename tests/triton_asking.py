# SPDX-License-Identifier: Apache-2.0
"""What tests ask a tritonserver, and what its answers should be."""

from __future__ import annotations

import queue
import re

import ml_dtypes
import numpy as np
from command_line import TEXT
from triton_server import BACKENDS, client
from waiting import PATIENCE

from trtllm_engram.builder.triton_tensorrt import FRONT_FILE
from trtllm_engram.runtime.cli import main
from trtllm_engram.runtime.hidden import SeededHidden
from trtllm_engram.runtime.text import encode

PROTOCOLS = ("http", "grpc")
LAYERS = (1, 5)
WORDS = {
    "text": "BYTES",
    "token_ids": "INT32",
    "lookback_ids": "INT32",
    "position": "INT64",
    "positions": "INT64",
}
ALL = ["hash_ids", *(f"layers.{i}.{what}" for i in LAYERS for what in ("rows", "hidden_out"))]
IDS = np.arange(4, dtype=np.int32)[None]


def write_model(store, repository, *options):
    assert main(["triton", str(store.path), "--model-repository", str(repository), *options]) == 0


def write_engine_model(store, repository, name, code, *options):
    """The folder of a model of the tensorrt form, with Python `code` in the engine's place."""
    plan = repository.parent / "no.plan"
    plan.write_bytes(b"")
    write_model(
        store, repository, "--name", name, "--form", "tensorrt", "--engine", str(plan), *options
    )
    model = repository / name
    edit_config(model, '"tensorrt"', '"python"')
    edit_config(model, "KIND_GPU", "KIND_CPU")
    edit_config(model, r".*(gpus|profile|default_model_filename): .*\n", "")
    (model / "1/model.py").write_text(code)
    front = model / FRONT_FILE
    if front.is_symlink():  # a backend of Python looks for the rest of it beside itself
        front.rename(model / "libtriton_python.so")
        for file in [*(BACKENDS / "python").glob("triton_python_*"), model / "1/model.py"]:
            (model / file.name).symlink_to(file)
    return model


def edit_config(model, pattern, text):
    config = model / "config.pbtxt"
    found, count = re.subn(pattern, text, config.read_text())
    assert count
    config.write_text(found)


def ask(connection, inputs, outputs, model="engram", **options):
    """An answer's arrays; inputs [B, ...] by name."""
    made = [output(connection, name) for name in outputs]
    answer = connection.infer(model, wrap(connection, inputs), outputs=made, **options)
    return {name: answer.as_numpy(name) for name in outputs}


def ask_at_once(connection, asked):
    """Sends all inputs before the first answer: yields each answer's number among them, and what it
    has of ALL, as they come."""
    answers = queue.Queue()
    outputs = [output(connection, name) for name in ALL]
    for number, inputs in enumerate(asked):
        connection.async_infer(
            "engram",
            wrap(connection, inputs),
            lambda result, error, number=number: answers.put((number, result, error)),
            outputs=outputs,
        )
    for _ in asked:
        number, result, error = answers.get(timeout=PATIENCE)
        assert error is None, error
        yield number, {name: result.as_numpy(name) for name in ALL}


def module_of(connection):
    return client("http" if ".http." in type(connection).__module__ else "grpc")


def output(connection, name):
    return module_of(connection).InferRequestedOutput(name)


def wrap(connection, inputs):
    tensors = []
    for name, array in inputs.items():
        tensor = module_of(connection).InferInput(name, array.shape, WORDS.get(name, "BF16"))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def ids_of(expected, store):
    """The text's token ids."""
    return encode(store.tokenizer_json, TEXT)


def hidden_of(store, start, stop):
    """As `run` makes them, a batch of one."""
    source = SeededHidden(store.config)
    return {f"layers.{i}.hidden": source(i, start, stop)[None] for i in LAYERS}


def same(found, expected):
    return np.array_equal(as_bits(found), as_bits(expected))


def as_bits(array):
    """gRPC and HTTP clients give BF16 as what they like."""
    if array.dtype == np.float32:
        array = array.astype(ml_dtypes.bfloat16)
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def check(answer, expected, start, stop):
    for index, layer in enumerate(LAYERS):
        wanted = expected[f"layers.{layer}.hash_ids"][start:stop]
        assert np.array_equal(answer["hash_ids"][0, :, index], wanted)
        assert same(answer[f"layers.{layer}.rows"][0], expected[f"layers.{layer}.rows"][start:stop])
        wanted = expected[f"layers.{layer}.hidden"][start:stop]
        assert same(answer[f"layers.{layer}.hidden_out"][0], wanted)


def table_bytes(store):
    config = store.config
    return sum(config.num_embeddings) * (config.head_dim + config.head_dim // 32)
