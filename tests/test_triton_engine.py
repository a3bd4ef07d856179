# SPDX-License-Identifier: Apache-2.0
"""The python form with an engine on a GPU, in a real server."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import reference
from command_line import TEXT
from engine_cases import MAX_TOKENS, build_plan
from engines import on_gpu, small_store
from triton_asking import ALL, LAYERS, PROTOCOLS, ask, ask_at_once, hidden_of, write_model
from triton_server import MARKS, client, make_python, serve

from trtllm_engram.plugins.registration import import_tensorrt
from trtllm_engram.runtime import Tables
from trtllm_engram.runtime.compare.report import HIDDEN_LIMIT_BF16_ULPS
from trtllm_engram.runtime.pieces import Executor, Piece
from trtllm_engram.runtime.session import EngramSession
from trtllm_engram.runtime.tensorrt_files import find_tensorrt
from trtllm_engram.runtime.text import encode

pytestmark = [*MARKS, pytest.mark.unsanitized]
NOTHING = np.full((1, 2), -1, np.int32)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def plan(store):
    return build_plan(store)


@pytest.fixture(scope="module")
def made_by_ops(store):
    """What eager ops make on the CPU of a text from its start, as answers have it."""
    with Tables.of_store(store) as tables:
        executor = Executor(EngramSession(store, "cpu", tables))

        def make(ids):
            hidden = {
                layer: hidden_of(store, 0, ids.size)[f"layers.{layer}.hidden"][0]
                for layer in LAYERS
            }
            (made,) = executor.run([Piece(ids, 0, NOTHING[0], hidden)], with_rows=True)
            return made

        yield make


@pytest.fixture(scope="module")
def server(tmp_path_factory, store, plan):
    """Two models on one engine, of two instances each; `turns` keeps sequences."""
    folder = tmp_path_factory.mktemp("served")
    options = ("--engine", str(plan), "--instances", "2", "--device", "cuda:0")
    write_model(store, folder / "models", *options)
    write_model(store, folder / "models", "--name", "turns", "--sequences", *options)
    python = make_python(folder / "python")
    (site,) = folder.glob("python/lib/python3*/site-packages")
    (site / "tensorrt.pth").write_text(str(Path(import_tensorrt().__file__).parents[1]))
    libraries = {"LD_LIBRARY_PATH": str(find_tensorrt()[0].library.parent)}
    with serve(
        folder / "models",
        python,
        folder / "log",
        "--model-control-mode=explicit",
        environment=libraries,
    ) as server:
        for name in ("engram", "turns"):
            server.connect("grpc").load_model(name)
        yield server


def text_of(store, size, seed=0):
    return np.random.default_rng(seed).integers(0, store.token_map.size, size, dtype=np.int32)


def answered(store, made, answer, start, stop):
    """Row ids and rows are the ops' bits, residual streams within the bound of an engine."""
    assert np.array_equal(answer["hash_ids"][0], made.hash_ids[start:stop])
    for layer in LAYERS:
        rows = values_of(answer[f"layers.{layer}.rows"][0])
        np.testing.assert_array_equal(rows, values_of(made.rows[layer][start:stop]))
        found = values_of(answer[f"layers.{layer}.hidden_out"][0])
        expected = values_of(made.hidden[layer][start:stop])
        given = values_of(hidden_of(store, start, stop)[f"layers.{layer}.hidden"][0])
        ulp = reference.bf16_ulp(np.maximum(np.abs(expected), np.abs(given)))
        assert (np.abs(found - expected) <= 2 * HIDDEN_LIMIT_BF16_ULPS * ulp).all()


def values_of(array):
    """Clients give BF16 as what they like."""
    if array.dtype == np.float32:
        return array
    return reference.bf16_values(array.view(np.uint16))


@on_gpu
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_client_carries_the_past(server, store, made_by_ops, protocol):
    """Cut anywhere, pieces of no token among them."""
    ids, lookback = text_of(store, 100), NOTHING
    made, connection = made_by_ops(ids), server.connect(protocol)
    for start, stop in ((0, 1), (1, 1), (1, 8), (8, 64), (64, 100)):
        inputs = {
            "token_ids": ids[None, start:stop],
            "lookback_ids": lookback,
            "position": np.array([[start]], np.int64),
            **hidden_of(store, start, stop),
        }
        answer = ask(connection, inputs, [*ALL, "next_lookback_ids"])
        answered(store, made, answer, start, stop)
        lookback = answer["next_lookback_ids"]


@on_gpu
def test_text(server, store, made_by_ops):
    ids = encode(store.tokenizer_json, TEXT)
    inputs = {"text": np.array([[TEXT.encode()]], np.object_), **hidden_of(store, 0, ids.size)}
    answer = ask(server.connect("grpc"), inputs, ALL)
    answered(store, made_by_ops(ids), answer, 0, ids.size)


@on_gpu
def test_requests_of_any_sizes_side_by_side(server, store, made_by_ops):
    """Sent at once: the server packs what waits, more than the engine takes at a time."""
    sizes = [1 + number * 11 % MAX_TOKENS for number in range(40)]
    texts = [text_of(store, size, size) for size in sizes]
    asked = [{"token_ids": ids[None], **hidden_of(store, 0, ids.size)} for ids in texts]
    for number, answer in ask_at_once(server.connect("grpc"), asked):
        answered(store, made_by_ops(texts[number]), answer, 0, texts[number].size)


@on_gpu
def test_sequences_interleaved(server, store, made_by_ops):
    connection = server.connect("grpc")
    texts = {sequence: text_of(store, 30, sequence) for sequence in (1, 2, 3)}
    made = {sequence: made_by_ops(ids) for sequence, ids in texts.items()}
    for start in range(0, 30, 3):
        for sequence, ids in texts.items():
            inputs = {"token_ids": ids[None, start : start + 3]}
            answer = ask(
                connection,
                inputs | hidden_of(store, start, start + 3),
                ALL,
                "turns",
                sequence_id=sequence,
                sequence_start=start == 0,
                sequence_end=start == 27,
            )
            answered(store, made[sequence], answer, start, start + 3)


@on_gpu
def test_a_request_larger_than_the_engine_is_refused(server, store, made_by_ops):
    connection = server.connect("grpc")
    ids = text_of(store, MAX_TOKENS + 1)
    inputs = {"token_ids": ids[None], **hidden_of(store, 0, ids.size)}
    expected = re.escape(f"expected at most {MAX_TOKENS} in a request, found {ids.size}")
    with pytest.raises(client("grpc").InferenceServerException, match=expected):
        ask(connection, inputs, ALL)
    inputs = {"token_ids": ids[None, :5], **hidden_of(store, 0, 5)}
    answered(store, made_by_ops(ids[:5]), ask(connection, inputs, ALL), 0, 5)
