# SPDX-License-Identifier: Apache-2.0
"""The python form on a real tritonserver: what it answers, what it refuses, what it shares."""

from __future__ import annotations

import json
import os
import queue
import re
import site
import subprocess
import time
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import small_checkpoint
from command_line import COMMAND, TEXT
from safetensors.numpy import load_file
from triton_server import client, make_python, serve, table_memory, wait_until

from trtllm_engram.builder.prepare import prepare
from trtllm_engram.runtime import Group, Tables, open_store
from trtllm_engram.runtime.cli import main
from trtllm_engram.runtime.hidden import SeededHidden
from trtllm_engram.runtime.pieces import Piece
from trtllm_engram.runtime.text import encode

pytestmark = [
    pytest.mark.triton,
    pytest.mark.multiproc,
    pytest.mark.xdist_group("triton"),  # one server at a time: each has a dozen threads
]
PROTOCOLS = ("http", "grpc")
LAYERS = (1, 5)
WORDS = {
    "text": "BYTES",
    "token_ids": "INT32",
    "lookback_ids": "INT32",
    "position": "INT64",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def store(folder):
    """Tables of 32 MB, so that a copy too many shows."""
    prepare(small_checkpoint(folder / "checkpoint", engram_vocab_size=60_000), folder / "store")
    return open_store(folder / "store")


@pytest.fixture(scope="module")
def python(folder):
    return make_python(folder / "python")


@pytest.fixture(scope="module")
def server(folder, store, python):
    """With `engram`, two instances, and `turns`, two instances that keep sequences."""
    repository = folder / "models"
    for name, options in (("engram", ()), ("turns", ("--sequences",))):
        write_model(store, repository, "--name", name, "--instances", "2", *options)
    with serve(repository, python, folder / "log", "--model-control-mode=explicit") as server:
        connection = server.connect("http")
        for name in ("engram", "turns"):
            connection.load_model(name)
        yield server


@pytest.fixture(scope="module")
def expected(folder, store):
    """What `run` makes of the text."""
    (folder / "text").write_text(TEXT)
    words = ["--text", str(folder / "text"), "--output", str(folder / "out"), "--rows", "--json"]
    assert main(["run", str(store.path), *words]) == 0
    return load_file(folder / "out")


def write_model(store, repository, *options):
    assert main(["triton", str(store.path), "--model-repository", str(repository), *options]) == 0


def ask(connection, inputs, outputs, model="engram", **options):
    """An answer's arrays; inputs [B, ...] by name."""
    made = [output(connection, name) for name in outputs]
    answer = connection.infer(model, wrap(connection, inputs), outputs=made, **options)
    return {name: answer.as_numpy(name) for name in outputs}


def module_of(connection):
    return client("http" if ".http." in type(connection).__module__ else "grpc")


def output(connection, name):
    return module_of(connection).InferRequestedOutput(name)


def wrap(connection, inputs):
    tensors = []
    for name, array in inputs.items():
        tensor = module_of(connection).InferInput(name, array.shape, WORDS.get(name, "BF16"))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def ids_of(expected, store):
    """The text's token ids."""
    return encode(store.tokenizer_json, TEXT)


def hidden_of(store, start, stop):
    """As `run` makes them, a batch of one."""
    source = SeededHidden(store.config)
    return {f"layers.{i}.hidden": source(i, start, stop)[None] for i in LAYERS}


def same(found, expected):
    return np.array_equal(as_bits(found), as_bits(expected))


def as_bits(array):
    """gRPC and HTTP clients give BF16 as what they like."""
    if array.dtype == np.float32:
        array = array.astype(ml_dtypes.bfloat16)
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def check(answer, expected, start, stop):
    for index, layer in enumerate(LAYERS):
        wanted = expected[f"layers.{layer}.hash_ids"][start:stop]
        assert np.array_equal(answer["hash_ids"][0, :, index], wanted)
        assert same(answer[f"layers.{layer}.rows"][0], expected[f"layers.{layer}.rows"][start:stop])
        wanted = expected[f"layers.{layer}.hidden"][start:stop]
        assert same(answer[f"layers.{layer}.hidden_out"][0], wanted)


ALL = ["hash_ids", *(f"layers.{i}.{what}" for i in LAYERS for what in ("rows", "hidden_out"))]


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
    connection = server.connect("grpc")
    answers: queue.Queue = queue.Queue()
    outputs = [output(connection, name) for name in ALL]
    sizes = [1 + number * 7 % ids.size for number in range(64)]
    for size in sizes:
        inputs = {"token_ids": ids[None, :size], **hidden_of(store, 0, size)}
        connection.async_infer(
            "engram",
            wrap(connection, inputs),
            lambda result, error, size=size: answers.put((size, result, error)),
            outputs=outputs,
        )
    for _ in sizes:
        size, result, error = answers.get(timeout=60)
        assert error is None
        check({name: result.as_numpy(name) for name in ALL}, expected, 0, size)


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


IDS = np.arange(4, dtype=np.int32)[None]
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
        number, result, error = answers.get(timeout=60)
        assert (error is not None) == (number % 3 == 0)
        if error is None:
            wanted = expected["layers.5.hash_ids"]
            assert np.array_equal(result.as_numpy("hash_ids")[0, :, 1], wanted)


def metric(server, name, **labels):
    """Sum over the instances."""
    lines = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", server.metrics(), re.MULTILINE)
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    return sum(float(value) for given, value in lines if wanted <= set(given.split(",")))


def test_metrics_are_tritons_own(server, store, expected):
    ids = ids_of(expected, store)
    connection = server.connect("grpc")
    model = {"model": "engram", "version": "1"}  # as Triton's own metrics have it
    names = ("lookups", "rows", "rows_unique", "lookup_seconds", "errors")

    def look():
        server_has = {name: metric(server, f"engram_{name}_total", **model) for name in names}
        return server_has | {"in 5": metric(server, "engram_rows_total", table="engram_5", **model)}

    before = look()
    ask(connection, {"token_ids": ids[None]}, ["layers.5.rows"])
    with pytest.raises(client("grpc").InferenceServerException):
        ask(connection, {"token_ids": -1 - IDS}, ["layers.5.rows"])
    made = {name: value - before[name] for name, value in look().items()}
    unique = [np.unique(expected[f"layers.{layer}.hash_ids"]).size for layer in LAYERS]
    assert made.pop("lookup_seconds") > 0
    assert made == {
        "lookups": 2,
        "rows": 2 * ids.size * 4,
        "rows_unique": sum(unique),
        "errors": 1,
        "in 5": ids.size * 4,
    }
    shared = metric(server, "engram_table_bytes", place="host", **model)
    assert shared == 2 * table_bytes(store)  # as each of the two instances maps it


def table_bytes(store):
    config = store.config
    return sum(config.num_embeddings) * (config.head_dim + config.head_dim // 32)


def test_two_instances_share_one_table(server, store):
    """Both models have two: the memory of all four is that of two tables."""
    wait_until(lambda: len(server.stubs()) == 4)
    stubs = server.stubs()
    assert len(stubs) == 4
    assert_shared(stubs, 2, 2 * table_bytes(store))


def assert_shared(pids, num_sharing, num_bytes):
    """The same memory lies in so many of the processes each, and has so many bytes in all."""
    mapped = [table_memory(pid) for pid in pids]
    holders = Counter(inode for each in mapped for inode in each)
    assert set(holders.values()) == {num_sharing}
    memory = {inode: size for each in mapped for inode, size in each.items()}
    assert sum(memory.values()) == pytest.approx(num_bytes, rel=0.02)


def test_a_keepers_table_is_everybodys(server, store, folder):
    """One copy for a keeper, a model's two instances and this process; it outlives the keeper."""
    keeper = f"triton-{folder.name}"
    command = [*COMMAND, "tables", "serve", str(store.path), "--name", keeper]
    options = ["--memory", "keeper", "--keeper", keeper]
    write_model(store, folder / "models", "--name", "kept", "--instances", "2", *options)
    connection = server.connect("http")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline()
            before = set(server.stubs())
            connection.load_model("kept")
            stubs = [pid for pid in server.stubs() if pid not in before]
            assert len(stubs) == 2
            with Tables.of_store(store, group=Group(keeper=keeper), memory="keeper"):
                assert_shared([process.pid, os.getpid(), *stubs], 4, table_bytes(store))
        finally:
            process.terminate()
    assert ask(connection, {"token_ids": IDS}, ["layers.1.rows"], "kept")
    assert_shared(stubs, 2, table_bytes(store))
    connection.unload_model("kept")


def bench(server, capsys, *options):
    """`bench serving` for a second: (exit code, what it says)."""
    client("http")
    where = [f"--{protocol}={url}" for protocol, url in server.urls.items()]
    words = ["--pid", server.process.pid, "--seconds", "1", "--json", *where, *options]
    code = main(["bench", "serving", *map(str, words)])
    return code, json.loads(capsys.readouterr().out)


def test_the_benchmark_checks_and_weighs(server, capsys):
    wait_until(lambda: len(server.stubs()) == 4)  # those of a model just unloaded end in a while
    code, found = bench(server, capsys, "--sequence-model", "turns")
    assert (code, found["errors"]) == (0, [])
    assert all(kind["requests"] > 0 for kind in found["kinds"])
    assert len(found["kinds"]) == 5
    assert found["memory"][-1]["pss"] == pytest.approx(server.pss(), rel=0.25)


def test_the_benchmark_finds_a_wrong_bit(server, capsys, monkeypatch):
    def wrong(piece):
        return np.roll(piece.token_ids, 1)[: piece.lookback_ids.size]

    monkeypatch.setattr(Piece, "next_lookback_ids", property(wrong))
    code, found = bench(server, capsys)
    assert code == 1
    assert "next_lookback_ids: expected the reference's bits" in found["errors"][0]


def test_unload_and_reload_leak_nothing(server, store, folder):
    write_model(store, folder / "models", "--name", "again", "--instances", "2")
    connection = server.connect("http")
    others = set(server.stubs())
    process = Path(f"/proc/{server.process.pid}")
    used = set()

    def regions():
        """Of memory, between the server and its stubs."""
        maps = (process / "maps").read_text(encoding="utf-8")
        return set(re.findall(r"/dev/shm/triton_python_backend_shm_\S+", maps))

    def state():
        """Stubs, files and regions of the server, which it gives back one by one."""
        return set(server.stubs()) - others, len(list((process / "fd").iterdir())), len(regions())

    def use():
        connection.load_model("again")
        wanted = ask(connection, {"token_ids": IDS}, ["hash_ids"], "again")["hash_ids"]
        assert wanted.shape == (1, 4, 2, 4)
        used.update(regions())
        connection.unload_model("again")

    def at_rest():
        before = state()
        time.sleep(1)
        return state() == before and not before[0]

    use()
    wait_until(at_rest)
    first = state()
    pss = [server.pss()]
    for _ in range(3):
        use()
        wait_until(lambda: state() == first)
        assert state() == first
        pss.append(server.pss())
    assert used > regions()
    assert not [region for region in used - regions() if Path(region).exists()]
    # A leak grows with every turn; what pages the kernel has mapped may change in one.
    assert min(np.diff(pss)) < table_bytes(store) / 10


def test_a_reload_meets_while_the_old_one_serves(server):
    """Triton starts a model's new instances before the old ones end."""
    connection = server.connect("http")
    connection.load_model("engram")
    assert ask(connection, {"token_ids": IDS}, ["hash_ids"])["hash_ids"].shape == (1, 4, 2, 4)


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


@pytest.mark.parametrize("options", [(), ("--sequences",)], ids=["alone", "sequences"])
def test_the_server_understands_the_tensorrt_form(server, store, folder, options):
    """Without a GPU: its TensorRT backend is not there, so what a server checks of a configuration
    itself (batch inputs and outputs, states, graphs) is checked as a Python model's."""
    name = "plan-" + "-".join(options or ["alone"])
    (folder / "no.plan").write_bytes(b"")
    words = ["--name", name, "--form", "tensorrt", "--engine", str(folder / "no.plan"), *options]
    write_model(store, folder / "models", *words)
    connection = server.connect("http")
    with pytest.raises(client("http").InferenceServerException, match="backend 'tensorrt'"):
        connection.load_model(name)
    config = folder / "models" / name / "config.pbtxt"
    text = config.read_text().replace('"tensorrt"', '"python"').replace("KIND_GPU", "KIND_CPU")
    text = re.sub(r".*(gpus|profile|default_model_filename): .*\n", "", text)
    config.write_text(text)
    (config.parent / "1/model.py").write_text("class TritonPythonModel:\n    pass\n")
    connection.load_model(name)
    understood = connection.get_model_config(name)
    assert understood["batch_input"][0]["target_name"] == ["cu_seqlens"]
    assert [one["target_name"] for one in understood["batch_output"]] == [
        [f"layers.{layer}.hidden_out"] for layer in LAYERS
    ]
    assert len(understood["optimization"]["cuda"]["graph_spec"]) == 2
    states = understood.get("sequence_batching", {}).get("state", [])
    assert [one["initial_state"][0]["data_file"] for one in states] == ["no_past"] * len(options)
    connection.unload_model(name)


def test_no_keeper_is_an_error_that_says_so(server, store, folder):
    options = ["--memory", "keeper", "--keeper", "nobody"]
    write_model(store, folder / "models", "--name", "unkept", *options)
    with pytest.raises(client("http").InferenceServerException, match="nobody"):
        server.connect("http").load_model("unkept")


@pytest.mark.skipif(np.__version__.startswith("1."), reason="numpy 1 is installed")
def test_numpy_2(folder, store, expected, tmp_path):
    """Its Python backend dies of text: a model that takes text is refused, token ids pass."""
    python = make_python(tmp_path / "python", site_packages=Path(site.getsitepackages()[0]))
    write_model(store, tmp_path / "models", "--name", "words")
    write_model(store, tmp_path / "models", "--name", "engram", "--no-text")
    ids = ids_of(expected, store)
    inputs = {"token_ids": ids[None], **hidden_of(store, 0, ids.size)}
    with serve(tmp_path / "models", python, tmp_path / "log") as server:
        check(ask(server.connect("grpc"), inputs, ALL), expected, 0, ids.size)
        assert not server.connect("http").is_model_ready("words")
        assert "text: expected numpy below 2" in server.log()
