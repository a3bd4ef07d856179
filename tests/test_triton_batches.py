# SPDX-License-Identifier: Apache-2.0
"""What a real tritonserver asks this library about an engine of the tensorrt form: what it joins
fits that engine, and its tables are there. A Python model in the engine's place tells what it was
given at a time."""

from __future__ import annotations

import queue
import re
from pathlib import Path

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


def request_of(store, size):
    return {
        "token_ids": np.zeros((1, size), np.int32),
        "positions": np.arange(size)[None],
        "lookback_ids": np.full((1, 2), -1, np.int32),
        **hidden_of(store, 0, size),
    }


def send_to(connection, name, inputs, answers, number):
    connection.async_infer(
        name,
        wrap(connection, inputs),
        lambda result, error: answers.put((number, result, error)),
        outputs=[output(connection, "next_lookback_ids")],
        request_id=f"number {number}",
    )


def batches_of(server, store, model):
    """Sends a request that keeps the model busy, and all of SIZES; answers by their sizes, each the
    number of requests and of tokens that the model was given at a time."""
    name, connection, answers = model.name, server.connect("grpc"), queue.Queue()
    connection.load_model(name)

    def send(number, size):
        send_to(connection, name, request_of(store, size), answers, number)

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


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_bad_request_fails_alone(server, store, folder, protocol):
    model = make_model(store, folder / "models", f"alone-{protocol}")
    (model / "go").touch()
    connection = server.connect(protocol)
    connection.load_model(model.name)
    for inputs, said in bad_requests(store):
        with pytest.raises(client(protocol).InferenceServerException, match=r"CANCELLED|400"):
            connection.infer(model.name, wrap(connection, inputs), request_id="bad")
        wait_until(lambda said=said: f"request 'bad' is cancelled: {said}" in server.log())
        good = request_of(store, LENGTH)
        outputs = [output(connection, "next_lookback_ids")]
        answer = connection.infer(model.name, wrap(connection, good), outputs=outputs)
        assert answer.as_numpy("next_lookback_ids").tolist() == [[1, LENGTH]]
    connection.unload_model(model.name)


def test_bad_requests_spoil_none_beside_them(server, store, folder):
    model = make_model(store, folder / "models", "beside")
    name, connection, answers = model.name, server.connect("grpc"), queue.Queue()
    connection.load_model(name)
    send_to(connection, name, request_of(store, 1), answers, 0)
    wait_until(lambda: (model / "busy").exists(), server.log)
    bad = [inputs for inputs, _ in bad_requests(store)]
    sent = [one for inputs in bad for one in (inputs, request_of(store, LENGTH))]
    for number, inputs in enumerate(sent, start=1):
        send_to(connection, name, inputs, answers, number)
    (model / "go").touch()
    for _ in range(1 + len(sent)):
        number, result, error = answers.get(timeout=PATIENCE)
        assert (error is not None) == (number % 2 == 1), (number, error)
        if error is None:
            requests, tokens = result.as_numpy("next_lookback_ids")[0]
            assert tokens == (requests * LENGTH if number else 1)
    connection.unload_model(name)


@pytest.mark.parametrize("text", ["many", "0", "131 tokens"])
def test_a_parameter_that_is_no_number(server, store, folder, text):
    model = make_model(store, folder / "models", "bad-" + re.sub(" ", "-", text))
    edit_config(model, f'string_value: "{MAX_TOKENS}"', f'string_value: "{text}"')
    said = f"parameters: max_tokens: expected 1 or more, found '{text}'"
    with pytest.raises(client("http").InferenceServerException, match=said):
        server.connect("http").load_model(model.name)


def tables_of(server):
    """Those that the server has in memory."""
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    return sorted(set(re.findall(r"memfd:trtllm-engram:(\w+)\.values", maps)))


def test_tables_go_with_the_last_model_and_come_as_the_file_has_them(server, store, folder):
    """Two models on the same tables."""
    connection, file = server.connect("http"), folder / "tables.toml"
    models = [make_model(store, folder / "models", name) for name in ("first", "second")]
    text = file.read_text()
    on_disk = re.sub(r"(?s)(engram_5.*)", r'\1\nplacement = "disk"', text)

    def has_tables(*names):
        wait_until(lambda: tables_of(server) == list(names), lambda: tables_of(server))

    has_tables()
    for model in models:
        connection.load_model(model.name)
    has_tables("engram_1", "engram_5")
    connection.unload_model("first")
    wait_until(lambda: "successfully unloaded 'first'" in server.log())
    has_tables("engram_1", "engram_5")
    connection.unload_model("second")
    has_tables()
    file.write_text(on_disk)
    connection.load_model("first")
    has_tables("engram_1")
    file.write_text(text)
    connection.load_model("second")  # a table that has changed since
    has_tables("engram_1", "engram_5")
    file.write_text(on_disk)
    (models[1] / "1/model.py").write_text(f"{MODEL}# changed\n")
    connection.load_model("second")  # while it serves
    has_tables("engram_1")
    for model in models:
        connection.unload_model(model.name)
    has_tables()


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
