# SPDX-License-Identifier: Apache-2.0
"""Models on a real tritonserver that keep the past of sequences."""

from __future__ import annotations

import numpy as np
import pytest
from triton_asking import ALL, PROTOCOLS, ask, check, hidden_of, ids_of
from triton_server import MARKS, client

pytest_plugins = ["triton_fixtures"]
pytestmark = MARKS
MODELS = ("turns",)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sequences_interleaved(server, store, expected, protocol):
    """Three texts, each the whole one, in pieces of their own sizes, turn by turn."""
    ids = ids_of(expected, store)
    connection = server.connect(protocol)
    at = {1: 0, 2: 0, 3: 0}
    while min(at.values()) < ids.size:
        for sequence, start in at.items():
            stop = min(start + 2 * sequence, ids.size)
            if start == stop:
                continue
            answer = ask(
                connection,
                {"token_ids": ids[None, start:stop], **hidden_of(store, start, stop)},
                ALL,
                "turns",
                sequence_id=sequence,
                sequence_start=start == 0,
                sequence_end=stop == ids.size,
            )
            check(answer, expected, start, stop)
            at[sequence] = stop


def test_a_refused_request_leaves_its_sequence_as_it_was(server, store, expected):
    ids = ids_of(expected, store)
    connection = server.connect("grpc")
    for start, stop in ((0, 3), (3, ids.size)):
        options = {"sequence_id": 9, "sequence_start": start == 0}
        if start:
            bad = {"token_ids": np.array([[99999]], np.int32)}
            with pytest.raises(client("grpc").InferenceServerException, match="expected 0 to"):
                ask(connection, bad, ["hash_ids"], "turns", sequence_id=9)
        inputs = {"token_ids": ids[None, start:stop], **hidden_of(store, start, stop)}
        options["sequence_end"] = stop == ids.size
        check(ask(connection, inputs, ALL, "turns", **options), expected, start, stop)
