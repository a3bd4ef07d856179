# SPDX-License-Identifier: Apache-2.0
"""Models of the tensorrt form with Python in the engine's place, which tells what it was given at a
time, and what they are asked."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import numpy as np
from triton_asking import hidden_of, output, wrap, write_engine_model
from triton_server import serve

MAX_TOKENS = 131
TOO_MANY = 200
SIZES = [1 + number * 11 % MAX_TOKENS for number in range(40)]
SIZES[20:20] = [TOO_MANY]
MODEL = """
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.folder = Path(args["model_repository"])

    def execute(self, requests):
        (self.folder / "busy").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        tokens = [pb_utils.get_input_tensor_by_name(one, "token_ids") for one in requests]
        sizes = [one.as_numpy().size for one in tokens]
        total = sum(sizes)
        with (self.folder / "batches").open("a") as file:
            print(*sizes, file=file)
        told = pb_utils.Tensor("next_lookback_ids", np.array([[len(requests), total]], np.int32))
        return [pb_utils.InferenceResponse([told]) for _ in requests]
"""


@contextlib.contextmanager
def serve_folder(folder, python):
    """A server of folder/models, where nothing is yet, with the tables of make_model's file."""
    (folder / "models").mkdir()
    explicit = "--model-control-mode=explicit"
    tables = {"TRTLLM_ENGRAM_TABLES": str(folder / "tables.toml")}
    with serve(folder / "models", python, folder / "log", explicit, environment=tables) as server:
        yield server


def make_model(store, repository, name, *options):
    """Whose tables.toml lies beside the repository."""
    sizes = ("--max-batch", "8", "--max-tokens", str(MAX_TOKENS))
    model = write_engine_model(store, repository, name, MODEL, *sizes, *options)
    (model / "tables.toml").replace(repository.parent / "tables.toml")
    return model


def waiting(server, name):
    """Requests that no instance has begun."""
    found = re.search(
        rf'^nv_inference_pending_request_count{{model="{name}".*}} (\d+)', server.metrics(), re.M
    )
    return int(found[1])


def request_of(store, size):
    return {
        "token_ids": np.zeros((1, size), np.int32),
        "positions": np.arange(size)[None],
        "lookback_ids": np.full((1, 2), -1, np.int32),
        **hidden_of(store, 0, size),
    }


def send_to(connection, name, inputs, answers, number, *, wanted="next_lookback_ids", **options):
    connection.async_infer(
        name,
        wrap(connection, inputs),
        lambda result, error: answers.put((number, result, error)),
        outputs=[output(connection, wanted)],
        request_id=f"number {number}",
        **options,
    )


def with_value(name, place, value):
    def spoil(inputs, store):
        inputs[name][0, place] = store.token_map.size if value is None else value

    return spoil


def with_length(name, size):
    def spoil(inputs, store):
        inputs[name] = np.zeros((1, size, *inputs[name].shape[2:]), inputs[name].dtype)

    return spoil


def of_two_texts(inputs, store):
    inputs.update({name: np.repeat(array, 2, axis=0) for name, array in inputs.items()})


LENGTH = 9
BAD = {
    with_value("token_ids", 7, None): "token_ids[7]: expected 0 to {last}, found {vocabulary}",
    with_value("token_ids", 0, -1): "token_ids[0]: expected 0 to {last}, found -1",
    with_value("lookback_ids", 1, None): "lookback_ids[1]: expected -1 to {last}, found",
    with_value("lookback_ids", 0, -2): "lookback_ids[0]: expected -1 to {last}, found -2",
    with_length("positions", 8): "positions: expected 9 tokens, as in token_ids, found 8",
    with_length("layers.5.hidden", 10): "layers.5.hidden: expected 9 tokens, as in token_ids",
    of_two_texts: "token_ids: expected one text in a request, found 2",
}


def bad_requests(store):
    """Each with what the log says of it."""
    vocabulary = store.token_map.size
    for spoil, said in BAD.items():
        inputs = request_of(store, LENGTH)
        spoil(inputs, store)
        yield inputs, said.format(last=vocabulary - 1, vocabulary=vocabulary)


def without_past(inputs):
    """Those of a model that keeps sequences."""
    return {name: array for name, array in inputs.items() if name != "lookback_ids"}


def tables_of(server):
    """Those that the server has in memory."""
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    return sorted(set(re.findall(r"memfd:trtllm-engram:(\w+)\.values", maps)))
