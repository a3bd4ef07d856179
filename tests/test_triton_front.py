# SPDX-License-Identifier: Apache-2.0
"""Models of the tensorrt form that keep sequences, in a real tritonserver: this library stands
before the backend. A Python model in the engine's place writes down what it was given at a time."""

from __future__ import annotations

import queue
from itertools import chain

import pytest
from triton_asking import output, wrap
from triton_engine_models import (
    LENGTH,
    MAX_TOKENS,
    SIZES,
    TOO_MANY,
    bad_requests,
    make_model,
    request_of,
    send_to,
    serve_folder,
    waiting,
    without_past,
)
from triton_server import MARKS, client
from waiting import PATIENCE, wait_until

pytest_plugins = ["triton_fixtures"]
pytestmark = MARKS
HIDDEN_OUT = "layers.1.hidden_out"
FRONT = "libtriton_python.so"


@pytest.fixture(scope="module")
def server(folder, python):
    with serve_folder(folder, python) as server:
        yield server


def make(store, folder, name):
    return make_model(store, folder / "models", name, "--sequences")


def batches_of(model):
    """Numbers of tokens of the requests of each batch that the model was given."""
    return [list(map(int, line.split())) for line in (model / "batches").read_text().splitlines()]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_bad_request_fails_alone(server, store, folder, protocol):
    """With words, and its sequence goes on. Several texts in one the server itself refuses."""
    model = make(store, folder, f"alone-{protocol}")
    (model / "go").touch()
    connection = server.connect(protocol)
    connection.load_model(model.name)

    def step(inputs, **options):
        connection.infer(
            model.name,
            wrap(connection, without_past(inputs)),
            outputs=[output(connection, HIDDEN_OUT)],
            sequence_id=7,
            **options,
        )

    step(request_of(store, LENGTH), sequence_start=True)
    bad = [one for one in bad_requests(store) if not one[1].startswith("lookback_ids")]
    for inputs, said in bad:
        with pytest.raises(client(protocol).InferenceServerException) as refused:
            step(inputs)
        assert said in str(refused.value) or "must specify batch-size 1" in str(refused.value)
        step(request_of(store, LENGTH))
    step(request_of(store, LENGTH), sequence_end=True)
    assert batches_of(model) == [[LENGTH]] * (2 + len(bad))
    connection.unload_model(model.name)


def send_all(server, store, model, requests):
    """Keeps the model busy until all wait, each a sequence of its own: their errors, by number."""
    connection, answers = server.connect("grpc"), queue.Queue()
    connection.load_model(model.name)

    def send(number, inputs):
        text = {"sequence_id": 1 + number, "sequence_start": True, "sequence_end": True}
        asked = without_past(inputs)
        send_to(connection, model.name, asked, answers, number, wanted=HIDDEN_OUT, **text)

    send(0, request_of(store, 1))
    wait_until(lambda: (model / "busy").exists(), server.log)
    for number, inputs in enumerate(requests, start=1):
        send(number, inputs)
    wait_until(lambda: waiting(server, model.name) == len(requests), server.metrics)
    (model / "go").touch()
    errors = {}
    for _ in range(1 + len(requests)):
        number, _, errors[number] = answers.get(timeout=PATIENCE)
    connection.unload_model(model.name)
    assert errors.pop(0) is None
    return [str(errors[number] or "") for number in sorted(errors)]


def test_what_waits_runs_as_the_engine_takes_it(server, store, folder):
    model = make(store, folder, "joined")
    errors = send_all(server, store, model, [request_of(store, size) for size in SIZES])
    wanted = f"expected at most {MAX_TOKENS} tokens, which the engine takes, found {TOO_MANY}"
    for size, error in zip(SIZES, errors, strict=True):
        assert (wanted in error) if size == TOO_MANY else not error
    ran = batches_of(model)
    assert max(map(sum, ran)) <= MAX_TOKENS
    assert max(map(len, ran)) > 1
    assert sorted(chain(*ran)) == sorted([1, *(size for size in SIZES if size != TOO_MANY)])


def test_without_it_more_is_joined_than_fits(server, store, folder):
    model = make(store, folder, "too-much")
    (model / FRONT).unlink()
    send_all(server, store, model, [request_of(store, size) for size in SIZES])
    assert max(map(sum, batches_of(model))) > MAX_TOKENS


def test_bad_requests_spoil_none_beside_them(server, store, folder):
    model = make(store, folder, "beside")
    bad = [inputs for inputs, said in bad_requests(store) if said.startswith("token_ids[")]
    sent = [one for inputs in bad for one in (inputs, request_of(store, LENGTH))]
    errors = send_all(server, store, model, sent)
    assert ["expected 0 to" in error for error in errors] == [True, False] * len(bad)
    assert not any(errors[1::2])
    assert list(chain(*batches_of(model))) == [1] + [LENGTH] * len(bad)
