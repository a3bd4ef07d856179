# SPDX-License-Identifier: Apache-2.0
"""The python form on a real tritonserver answers what `run` makes."""

from __future__ import annotations

import numpy as np
import pytest
from command_line import TEXT
from triton_asking import ALL, PROTOCOLS, ask, ask_at_once, check, hidden_of, ids_of
from triton_server import MARKS

pytest_plugins = ["triton_fixtures"]
pytestmark = MARKS
MODELS = ("engram",)


@pytest.mark.parametrize("what", ["text", "token_ids"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_answers_are_what_run_makes(server, store, expected, protocol, what):
    ids = ids_of(expected, store)
    given = np.array([[TEXT.encode()]], np.object_) if what == "text" else ids[None]
    inputs = {what: given, **hidden_of(store, 0, ids.size)}
    check(ask(server.connect(protocol), inputs, ALL), expected, 0, ids.size)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_client_carries_the_past(server, store, expected, protocol):
    """lookback_ids and position, cut anywhere, pieces of no token among them."""
    ids = ids_of(expected, store)
    connection = server.connect(protocol)
    lookback = np.full((1, 2), -1, np.int32)
    for start, stop in ((0, 1), (1, 1), (1, 8), (8, ids.size)):
        inputs = {
            "token_ids": ids[None, start:stop],
            "lookback_ids": lookback,
            "position": np.array([[start]], np.int64),
            **hidden_of(store, start, stop),
        }
        answer = ask(connection, inputs, [*ALL, "next_lookback_ids"])
        check(answer, expected, start, stop)
        lookback = answer["next_lookback_ids"]


def test_rows_of_a_batch_are_texts_of_their_own(server, store, expected):
    ids = ids_of(expected, store)
    hidden = {name: np.repeat(one, 3, 0) for name, one in hidden_of(store, 0, 7).items()}
    inputs = {"token_ids": np.tile(ids[:7], (3, 1)), **hidden}
    answer = ask(server.connect("grpc"), inputs, ALL)
    for row in range(3):
        check({name: array[row : row + 1] for name, array in answer.items()}, expected, 0, 7)


def test_requests_of_any_sizes_side_by_side(server, store, expected):
    """Sent at once: the server packs what waits."""
    ids = ids_of(expected, store)
    sizes = [1 + number * 7 % ids.size for number in range(64)]
    asked = [{"token_ids": ids[None, :size], **hidden_of(store, 0, size)} for size in sizes]
    for number, answer in ask_at_once(server.connect("grpc"), asked):
        check(answer, expected, 0, sizes[number])
