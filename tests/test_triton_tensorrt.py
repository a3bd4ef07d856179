# SPDX-License-Identifier: Apache-2.0
"""The tensorrt form on a GPU, in a real server with Triton's TensorRT backend.

The backend is in no package: libtriton_tensorrt.so, built from its public sources of the server's
release, is put into .triton/server/pytriton/tritonserver/backends/tensorrt/ by hand, and beside
nvidia_pytriton.libs' libtritonserver a link of the name that it asks for (docs/serving.md).
"""

from __future__ import annotations

import queue

import numpy as np
import pytest
from engine_cases import MAX_BATCH, MAX_TOKENS, build_plan, check
from engines import on_gpu, small_store
from triton_server import (
    MARKS,
    client,
    make_python,
    needs_tensorrt_backend,
    serve,
    tensorrt_environment,
)
from waiting import PATIENCE, wait_until

from trtllm_engram.builder.model import ModelOptions, hidden_name, hidden_out_name
from trtllm_engram.plugins import library_path
from trtllm_engram.runtime.cli import main
from trtllm_engram.runtime.hidden import SeededHidden

pytestmark = [
    *MARKS,
    pytest.mark.unsanitized,
    needs_tensorrt_backend,
]
LAYERS = (1, 5)
TYPES = {"token_ids": "INT32", "positions": "INT64", "lookback_ids": "INT32"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("tensorrt"))


@pytest.fixture(scope="module")
def plan(store):
    return build_plan(store, "flat.plan", ModelOptions(flat_hidden=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


def write_model(store, plan, repository, *options):
    words = ["--model-repository", repository, "--form", "tensorrt", "--engine", plan]
    words += ["--max-batch", MAX_BATCH, *options]
    assert main(["triton", str(store.path), *map(str, words)]) == 0


def plugins(path):
    return f"--backend-config=tensorrt,plugins={path}"


@pytest.fixture(scope="module")
def server(folder, store, plan):
    """Two models on one table, of two instances each; `turns` keeps sequences."""
    repository = folder / "models"
    write_model(store, plan, repository, "--instances", "2")
    write_model(store, plan, repository, "--name", "turns", "--sequences", "--instances", "2")
    with serve(
        repository,
        make_python(folder / "python"),
        folder / "log",
        "--model-control-mode=explicit",
        "--log-verbose=1",
        plugins(library_path()),
        environment=tensorrt_environment(repository / "engram/tables.toml"),
    ) as server:
        for name in ("engram", "turns"):
            server.connect("grpc").load_model(name)
        yield server


def request(store, ids, start, lookback):
    """A piece of a text, as a batch of one."""
    source = SeededHidden(store.config)
    stop = start + ids.size
    hidden = {hidden_name(layer): source(layer, start, stop)[None] for layer in LAYERS}
    positions = np.arange(start, stop)[None]
    return {"token_ids": ids[None], "positions": positions, "lookback_ids": lookback, **hidden}


def wrap(inputs):
    tensors = []
    for name, array in inputs.items():
        tensor = client("grpc").InferInput(name, array.shape, TYPES.get(name, "BF16"))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def answered(store, inputs, result):
    """Holds an answer's residual streams against the reference."""
    feed = {name: array[0] for name, array in inputs.items() if name != "lookback_ids"}
    feed["lookback_ids"] = inputs["lookback_ids"]
    feed["cu_seqlens"] = np.array([0, feed["token_ids"].size], np.int32)
    found = {}
    for layer in LAYERS:
        name = hidden_out_name(layer)
        found[name] = result.as_numpy(name)[0].astype(inputs[hidden_name(layer)].dtype)
    check(store, feed, found)


def text_of(store, size, seed=0):
    return np.random.default_rng(seed).integers(0, store.token_map.size, size, dtype=np.int32)


NOTHING = np.full((1, 2), -1, np.int32)


@on_gpu
def test_requests_of_any_sizes_side_by_side(server, store):
    connection, answers = server.connect("grpc"), queue.Queue()
    sizes = [1 + number * 11 % MAX_TOKENS for number in range(40)]
    asked = [request(store, text_of(store, size, size), 0, NOTHING) for size in sizes]
    for number, inputs in enumerate(asked):
        connection.async_infer(
            "engram",
            wrap(inputs),
            lambda result, error, number=number: answers.put((number, result, error)),
        )
    for _ in asked:
        number, result, error = answers.get(timeout=PATIENCE)
        assert error is None, error
        answered(store, asked[number], result)


@on_gpu
def test_decode_steps_are_graph_launches(server, store):
    connection = server.connect("grpc")
    before = server.log().count("launching CUDA graph")
    text, lookback = text_of(store, 40), NOTHING
    for place in range(text.size):
        inputs = request(store, text[place : place + 1], place, lookback)
        result = connection.infer("engram", wrap(inputs))
        answered(store, inputs, result)
        lookback = result.as_numpy("next_lookback_ids")
    assert server.log().count("launching CUDA graph") - before == text.size


@on_gpu
def test_sequences_interleaved(server, store):
    connection = server.connect("grpc")
    texts = {sequence: text_of(store, 30, sequence) for sequence in (1, 2, 3)}
    at = dict.fromkeys(texts, 0)
    lookbacks = dict.fromkeys(texts, NOTHING)
    while min(at.values()) < 30:
        for sequence, start in at.items():
            ids = texts[sequence][start : start + sequence]
            if not ids.size:
                continue
            inputs = request(store, ids, start, lookbacks[sequence])
            result = connection.infer(
                "turns",
                wrap({name: one for name, one in inputs.items() if name != "lookback_ids"}),
                sequence_id=sequence,
                sequence_start=start == 0,
                sequence_end=start + ids.size == 30,
            )
            answered(store, inputs, result)
            lookbacks[sequence] = np.concatenate([ids[::-1], lookbacks[sequence][0]])[None, :2]
            at[sequence] += ids.size


@on_gpu
@pytest.mark.parametrize("size", [1, 9], ids=["graph", "enqueue"])
def test_a_bad_request_is_an_error_of_its_own(server, store, size):
    """Neither of the next one's nor of those beside it."""
    connection, answers = server.connect("grpc"), queue.Queue()
    good = request(store, text_of(store, size), 0, NOTHING)
    bad = {**good, "token_ids": good["token_ids"] + store.token_map.size}
    for number in range(30):
        connection.async_infer(
            "engram",
            wrap(bad if number % 3 == 0 else good),
            lambda result, error, number=number: answers.put((number, result, error)),
        )
    for _ in range(30):
        number, result, error = answers.get(timeout=PATIENCE)
        assert (error is not None) == (number % 3 == 0), error
        if error is None:
            answered(store, good, result)


@on_gpu
def test_a_bad_request_leaves_its_sequence_as_it_was(server, store):
    """With words, and no device fault for the next step."""
    connection, text, lookback = server.connect("grpc"), text_of(store, 24), NOTHING
    for place in range(0, text.size, 8):
        good = request(store, text[place : place + 8], place, lookback)
        bad = {**good, "token_ids": good["token_ids"] + store.token_map.size}
        lookback = text[place : place + 8][::-1][None, :2]
        sent = [bad, good] if place else [good]
        for inputs in sent:
            wrapped = wrap({name: one for name, one in inputs.items() if name != "lookback_ids"})
            options = {"sequence_id": 77, "sequence_start": place == 0}
            options["sequence_end"] = place + 8 == text.size and inputs is good
            if inputs is bad:
                with pytest.raises(client("grpc").InferenceServerException, match="expected 0 to"):
                    connection.infer("turns", wrapped, **options)
            else:
                answered(store, good, connection.infer("turns", wrapped, **options))


@on_gpu
def test_sequences_of_more_tokens_than_the_engine_takes(server, store):
    """Run in several steps, each a whole text."""
    connection, answers = server.connect("grpc"), queue.Queue()
    asked = [
        request(store, text_of(store, MAX_TOKENS - seed, seed), 0, NOTHING) for seed in range(9)
    ]
    for number, inputs in enumerate(asked):
        connection.async_infer(
            "turns",
            wrap({name: one for name, one in inputs.items() if name != "lookback_ids"}),
            lambda result, error, number=number: answers.put((number, result, error)),
            sequence_id=100 + number,
            sequence_start=True,
            sequence_end=True,
        )
    for _ in asked:
        number, result, error = answers.get(timeout=PATIENCE)
        assert error is None, error
        answered(store, asked[number], result)


@on_gpu
def test_no_more_tokens_than_the_engine_takes(tmp_path, store, plan, capsys):
    words = ["--form", "tensorrt", "--engine", str(plan), "--max-tokens", str(MAX_TOKENS + 1)]
    assert main(["triton", str(store.path), "--model-repository", str(tmp_path), *words]) == 2
    said = f"expected at most {plan}'s {MAX_TOKENS}, found {MAX_TOKENS + 1}"
    assert said in capsys.readouterr().err


@on_gpu
@pytest.mark.parametrize("name", ["engram", "turns"])
def test_unload_and_reload(server, store, name):
    connection = server.connect("grpc")
    for _ in range(3):
        connection.unload_model(name)
        connection.load_model(name)
        inputs, options = request(store, text_of(store, 9), 0, NOTHING), {}
        asked = dict(inputs)
        if name == "turns":
            del asked["lookback_ids"]
            options = {"sequence_id": 5, "sequence_start": True, "sequence_end": True}
        answered(store, inputs, connection.infer(name, wrap(asked), **options))


MISSING = {
    "plugin": ["Cannot find plugin: EngramHash"],
    "table": ["table 'engram_5': expected a bound name, found another, engram_1; TRTLLM_ENGRAM"],
    "store": ["table 'engram_1': ", "absent: cannot read: No such file or directory"],
}


@on_gpu
@pytest.mark.parametrize("missing", MISSING)
def test_what_is_missing_is_said_and_the_server_lives(tmp_path, store, plan, missing):
    """The model is unavailable, and loaded in the same server once its table is there."""
    repository = tmp_path / "models"
    write_model(store, plan, repository)
    tables = repository / "engram/tables.toml"
    options = [plugins(library_path())] if missing != "plugin" else []
    text = tables.read_text()
    if missing == "table":
        tables.write_text(text.replace("engram_5", "another"))
    elif missing == "store":
        tables.write_text(text.replace(str(store.path), str(tmp_path / "absent")))
    with serve(
        repository,
        make_python(tmp_path / "python"),
        tmp_path / "log",
        "--model-control-mode=explicit",
        *options,
        environment=tensorrt_environment(tables),
    ) as server:
        connection = server.connect("grpc")
        with pytest.raises(client("grpc").InferenceServerException):
            connection.load_model("engram")
        assert not connection.is_model_ready("engram")
        inputs = request(store, text_of(store, 9), 0, NOTHING)
        with pytest.raises(client("grpc").InferenceServerException):
            connection.infer("engram", wrap(inputs))
        said = [*MISSING[missing], "failed to load 'engram'"]
        wait_until(lambda: all(text in server.log() for text in said), server.log)
        assert server.process.poll() is None
        if missing != "plugin":
            tables.write_text(text)
            connection.load_model("engram")
            answered(store, inputs, connection.infer("engram", wrap(inputs)))
