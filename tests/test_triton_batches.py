# SPDX-License-Identifier: Apache-2.0
"""What a real tritonserver asks this library about an engine of the tensorrt form: what it joins
fits that engine, and its tables are there. A Python model in the engine's place tells what it was
given at a time."""

from __future__ import annotations

import queue
import re

import numpy as np
import pytest
from triton_asking import edit_config, hidden_of, output, wrap, write_engine_model
from triton_server import MARKS, client, serve
from waiting import PATIENCE, wait_until

pytest_plugins = ["triton_fixtures"]
pytestmark = MARKS

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
        total = sum(one.as_numpy().size for one in tokens)
        told = pb_utils.Tensor("next_lookback_ids", np.array([[len(requests), total]], np.int32))
        return [pb_utils.InferenceResponse([told]) for _ in requests]
"""


def without_the_library(model):
    (model / "batchstrategy.so").unlink()


def without_the_sizes(model):
    edit_config(model, r"preferred_batch_size: .*\n", "")


def make_model(store, repository, name):
    sizes = ("--max-batch", "8", "--max-tokens", str(MAX_TOKENS))
    model = write_engine_model(store, repository, name, MODEL, *sizes)
    (model / "tables.toml").replace(repository.parent / "tables.toml")
    return model


@pytest.fixture(scope="module")
def server(folder, python):
    (folder / "models").mkdir()
    explicit = "--model-control-mode=explicit"
    tables = {"TRTLLM_ENGRAM_TABLES": str(folder / "tables.toml")}
    with serve(folder / "models", python, folder / "log", explicit, environment=tables) as server:
        yield server


def waiting(server, name):
    """Requests that no instance has begun."""
    found = re.search(
        rf'^nv_inference_pending_request_count{{model="{name}".*}} (\d+)', server.metrics(), re.M
    )
    return int(found[1])


def batches_of(server, store, model):
    """Sends a request that keeps the model busy, and all of SIZES; answers by their sizes, each the
    number of requests and of tokens that the model was given at a time."""
    name, connection, answers = model.name, server.connect("grpc"), queue.Queue()
    connection.load_model(name)

    def send(number, size):
        ids = np.zeros((1, size), np.int32)
        inputs = {
            "token_ids": ids,
            "positions": np.arange(size)[None],
            "lookback_ids": np.full((1, 2), -1, np.int32),
            **hidden_of(store, 0, size),
        }
        connection.async_infer(
            name,
            wrap(connection, inputs),
            lambda result, error: answers.put((number, result, error)),
            outputs=[output(connection, "next_lookback_ids")],
        )

    send(0, 1)
    wait_until(lambda: (model / "busy").exists(), server.log)
    for number, size in enumerate(SIZES, start=1):
        send(number, size)
    wait_until(lambda: waiting(server, name) == len(SIZES), server.log)
    (model / "go").touch()
    found = {}
    for _ in range(1 + len(SIZES)):
        number, result, error = answers.get(timeout=PATIENCE)
        assert error is None, error
        found[number] = result.as_numpy("next_lookback_ids")[0]
    connection.unload_model(name)
    return [(size, *found[number]) for number, size in enumerate(SIZES, start=1)]


def test_a_batch_is_closed_before_it_is_too_large(server, store, folder):
    found = batches_of(server, store, make_model(store, folder / "models", "both"))
    assert [one for one in found if one[2] > MAX_TOKENS] == [(TOO_MANY, 1, TOO_MANY)]
    assert max(number for _, number, _ in found) > 2


@pytest.mark.parametrize("spoil", [without_the_library, without_the_sizes])
def test_what_closes_it(server, store, folder, spoil):
    """Where either is missing, more is joined than fits: mostly, as requests come in any order."""
    model = make_model(store, folder / "models", spoil.__name__)
    spoil(model)

    def joins_too_much():
        for mark in ("busy", "go"):
            (model / mark).unlink(missing_ok=True)
        found = batches_of(server, store, model)
        return any(number > 1 and tokens > MAX_TOKENS for _, number, tokens in found)

    assert any(joins_too_much() for _ in range(10))


@pytest.mark.parametrize("text", ["many", "0", "131 tokens"])
def test_a_parameter_that_is_no_number(server, store, folder, text):
    model = make_model(store, folder / "models", "bad-" + re.sub(" ", "-", text))
    edit_config(model, f'string_value: "{MAX_TOKENS}"', f'string_value: "{text}"')
    said = f"parameters: max_tokens: expected 1 or more, found '{text}'"
    with pytest.raises(client("http").InferenceServerException, match=said):
        server.connect("http").load_model(model.name)


def another_name(text, store):
    return text.replace("engram_5", "another")


def another_store(text, store):
    return text.replace(str(store.path), f"{store.path}-absent")


REFUSED = {
    another_name: "table 'engram_5': expected a bound name, found another, engram_1; "
    "TRTLLM_ENGRAM_TABLES, {file}, does not name it",
    another_store: "table 'engram_1': {store}-absent: cannot read: No such file or directory",
}


@pytest.mark.parametrize("spoil", REFUSED)
def test_without_its_tables_a_model_is_unavailable(store, tmp_path, python, spoil):
    """Until they are there: the server lives, and loads it then."""
    (tmp_path / "models").mkdir()
    model = make_model(store, tmp_path / "models", "engram")
    (model / "go").touch()
    file = tmp_path / "tables.toml"
    text = file.read_text()
    file.write_text(spoil(text, store))
    explicit = "--model-control-mode=explicit"
    with serve(
        tmp_path / "models",
        python,
        tmp_path / "log",
        explicit,
        environment={"TRTLLM_ENGRAM_TABLES": str(file)},
    ) as server:
        connection = server.connect("grpc")
        with pytest.raises(client("grpc").InferenceServerException) as refused:
            connection.load_model("engram")
        assert REFUSED[spoil].format(file=file, store=store.path) in str(refused.value)
        assert not connection.is_model_ready("engram")
        file.write_text(text)
        connection.load_model("engram")
        assert connection.is_model_ready("engram")
