# SPDX-License-Identifier: Apache-2.0
"""What models on a real tritonserver refuse, and that they go on."""

from __future__ import annotations

import queue
import re

import ml_dtypes
import numpy as np
import pytest
from triton_asking import IDS, LAYERS, PROTOCOLS, ask, ids_of, output, wrap, write_model
from triton_server import MARKS, client
from waiting import PATIENCE, wait_until

pytest_plugins = ["triton_fixtures"]
pytestmark = MARKS
MODELS = ("engram",)
BAD = {
    "nothing": ({}, "expected text or token_ids, found neither"),
    "both": ({"text": np.array([[b"a"]], np.object_), "token_ids": IDS}, "found both"),
    "two texts": (
        {"text": np.array([[b"a"], [b"b"]], np.object_)},
        "rows of a batch are token_ids",
    ),
    "not UTF-8": ({"text": np.array([[b"na\xefve"]], np.object_)}, "expected UTF-8"),
    "an id too high": ({"token_ids": IDS + 99999}, "token ids: expected 0 to"),
    "an id below 0": ({"token_ids": IDS - 1}, "token ids: expected 0 to"),
    "too many tokens": ({"token_ids": np.zeros((1, 9000), np.int32)}, "at most 8192"),
    "a lookback too high": (
        {"token_ids": IDS, "lookback_ids": np.array([[99999, -1]], np.int32)},
        "lookback_ids: expected -1 to",
    ),
    "a lookback without its position": (
        {"token_ids": IDS, "lookback_ids": np.array([[3, 2]], np.int32)},
        "lookback_ids: expected -1 before the text, whose position is 0 here, found 3",
    ),
    "a lookback past its position": (
        {
            "token_ids": IDS,
            "lookback_ids": np.array([[3, 2]], np.int32),
            "position": np.array([[1]], np.int64),
        },
        "whose position is 1 here, found 2",
    ),
    "a position below 0": (
        {"token_ids": IDS, "position": np.array([[-1]], np.int64)},
        "position: expected 0 to",
    ),
    "one hidden of two": (
        {"token_ids": IDS, "layers.1.hidden": np.zeros((1, 4, 2, 64), ml_dtypes.bfloat16)},
        "or none of them, found layers.1.hidden",
    ),
    "hidden of other tokens": (
        {"token_ids": IDS}
        | {f"layers.{i}.hidden": np.zeros((1, 3, 2, 64), ml_dtypes.bfloat16) for i in LAYERS},
        "expected 4 tokens in 1 rows, found [3, 1]",
    ),
    "hidden of another size": (
        {"token_ids": IDS}
        | {f"layers.{i}.hidden": np.zeros((1, 4, 2, 65), ml_dtypes.bfloat16) for i in LAYERS},
        "unexpected shape",
    ),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("inputs", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_request_gets_an_error_and_the_next_an_answer(server, inputs, message, protocol):
    connection = server.connect(protocol)
    if not inputs:
        inputs = {"position": np.array([[0]], np.int64)}
    with pytest.raises(client(protocol).InferenceServerException) as caught:
        ask(connection, inputs, ["hash_ids"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ask(connection, {"token_ids": IDS}, ["hash_ids"])["hash_ids"].shape == (1, 4, 2, 4)
    assert server.process.poll() is None


def test_residual_streams_need_residual_streams(server):
    with pytest.raises(client("grpc").InferenceServerException) as caught:
        ask(server.connect("grpc"), {"token_ids": IDS}, ["layers.5.hidden_out"])
    assert "layers.5.hidden_out: expected layers.5.hidden in the request" in str(caught.value)
    with pytest.raises(client("grpc").InferenceServerException, match="names no outputs"):
        server.connect("grpc").infer("engram", wrap(server.connect("grpc"), {"token_ids": IDS}))


def test_one_bad_request_spoils_none_beside_it(server, store, expected):
    ids = ids_of(expected, store)
    connection = server.connect("grpc")
    answers: queue.Queue = queue.Queue()
    for number in range(32):
        given = ids + 99999 if number % 3 == 0 else ids
        connection.async_infer(
            "engram",
            wrap(connection, {"token_ids": given[None]}),
            lambda result, error, number=number: answers.put((number, result, error)),
            outputs=[output(connection, "hash_ids")],
        )
    for _ in range(32):
        number, result, error = answers.get(timeout=PATIENCE)
        assert (error is not None) == (number % 3 == 0)
        if error is None:
            wanted = expected["layers.5.hash_ids"]
            assert np.array_equal(result.as_numpy("hash_ids")[0, :, 1], wanted)


BROKEN = """
from trtllm_engram.runtime.triton.model import TritonPythonModel as Whole


class TritonPythonModel(Whole):
    def initialize(self, args):
        super().initialize(args)
        read, run = self._reader.read, self._executor.run

        def broken_read(*args):
            request = read(*args)
            if 7 in request.pieces[0].token_ids:
                raise KeyError("while reading")
            return request

        def broken_run(pieces, with_rows):
            if any(9 in piece.token_ids for piece in pieces):
                raise ValueError("while running")
            return run(pieces, with_rows=with_rows)

        self._reader.read, self._executor.run = broken_read, broken_run
"""


def test_whatever_goes_wrong_is_one_request_s_error(server, store, folder):
    """Of a program with two faults that no request should meet."""
    write_model(store, folder / "models", "--name", "broken")
    (folder / "models/broken/1/model.py").write_text(BROKEN)
    connection, answers = server.connect("grpc"), queue.Queue()
    connection.load_model("broken")
    stubs = server.stubs()
    ids = {0: IDS, 1: IDS + 7, 2: IDS + 8}  # 1 has both
    said = {1: "while reading", 2: "while running"}
    for number in range(48):
        connection.async_infer(
            "broken",
            wrap(connection, {"token_ids": ids[number % 3]}),
            lambda result, error, number=number: answers.put((number, result, error)),
            outputs=[output(connection, "hash_ids")],
        )
    for _ in range(48):
        number, result, error = answers.get(timeout=PATIENCE)
        assert (said[number % 3] in str(error)) if number % 3 else (error is None), (number, error)
        if error is None:
            assert result.as_numpy("hash_ids").shape == (1, 4, 2, 4)
    assert server.stubs() == stubs
    failed = r'^engram_errors_total{.*kind="failed".*model="broken".*} 32$'
    wait_until(lambda: re.search(failed, server.metrics(), re.M), server.metrics)
    connection.unload_model("broken")


def test_a_model_without_its_store_is_unavailable(server, store, folder):
    moved = folder / "elsewhere"
    write_model(store, folder / "models", "--name", "lost")
    config = folder / "models/lost/config.pbtxt"
    config.write_text(config.read_text().replace(str(store.path), str(moved)))
    connection = server.connect("http")
    with pytest.raises(client("http").InferenceServerException) as caught:
        connection.load_model("lost")
    assert f"{moved}: expected " in str(caught.value)
    assert "a store (with engram.json), found none" in str(caught.value)
    assert not connection.is_model_ready("lost")
    assert ask(connection, {"token_ids": IDS}, ["hash_ids"])


def test_no_keeper_is_an_error_that_says_so(server, store, folder):
    options = ["--memory", "keeper", "--keeper", "nobody"]
    write_model(store, folder / "models", "--name", "unkept", *options)
    with pytest.raises(client("http").InferenceServerException, match="nobody"):
        server.connect("http").load_model("unkept")
