# SPDX-License-Identifier: Apache-2.0
"""What a real tritonserver asks this library about an engine of the tensorrt form: what it joins
fits that engine, and its tables are there. A Python model in the engine's place tells what it was
given at a time."""

from __future__ import annotations

import queue
import re

import pytest
from triton_asking import edit_config, output, wrap
from triton_engine_models import (
    LENGTH,
    MAX_TOKENS,
    MODEL,
    SIZES,
    TOO_MANY,
    bad_requests,
    make_model,
    request_of,
    send_to,
    serve_folder,
    tables_of,
    waiting,
)
from triton_server import MARKS, client, serve
from waiting import PATIENCE, wait_until

pytest_plugins = ["triton_fixtures"]
pytestmark = MARKS


def without_the_library(model):
    (model / "batchstrategy.so").unlink()


def without_the_sizes(model):
    edit_config(model, r"preferred_batch_size: .*\n", "")


@pytest.fixture(scope="module")
def server(folder, python):
    with serve_folder(folder, python) as server:
        yield server


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


KEPT = pytest.mark.parametrize("kept", [(), ("--sequences",)], ids=["alone", "sequences"])


@KEPT
def test_tables_go_with_the_last_model_and_come_as_the_file_has_them(server, store, folder, kept):
    """Two models on the same tables."""
    connection, file = server.connect("http"), folder / "tables.toml"
    names = [f"{name}{''.join(kept)}" for name in ("first", "second")]
    first, second = names
    models = [make_model(store, folder / "models", name, *kept) for name in names]
    text = file.read_text()
    on_disk = re.sub(r"(?s)(engram_5.*)", r'\1\nplacement = "disk"', text)

    def has_tables(*names):
        wait_until(lambda: tables_of(server) == list(names), lambda: tables_of(server))

    has_tables()
    for model in models:
        connection.load_model(model.name)
    has_tables("engram_1", "engram_5")
    connection.unload_model(first)
    wait_until(lambda: f"successfully unloaded '{first}'" in server.log())
    has_tables("engram_1", "engram_5")
    connection.unload_model(second)
    has_tables()
    file.write_text(on_disk)
    connection.load_model(first)
    has_tables("engram_1")
    file.write_text(text)
    connection.load_model(second)  # a table that has changed since
    has_tables("engram_1", "engram_5")
    file.write_text(on_disk)
    (models[1] / "1/model.py").write_text(f"{MODEL}# changed\n")
    connection.load_model(second)  # while it serves
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


@KEPT
@pytest.mark.parametrize("spoil", REFUSED)
def test_without_its_tables_a_model_is_unavailable(store, tmp_path, python, spoil, kept):
    """Until they are there: the server lives, and loads it then."""
    (tmp_path / "models").mkdir()
    model = make_model(store, tmp_path / "models", "engram", *kept)
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
