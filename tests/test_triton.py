# SPDX-License-Identifier: Apache-2.0
"""Model repositories as `triton` writes them, and pieces of requests side by side, server or not.

What a server makes of them: test_triton_answers.py and its siblings.
"""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import names_below, refusal, small_checkpoint
from command_line import only_line
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_engram.builder.model import ModelOptions, input_shapes
from trtllm_engram.builder.pbtxt import Word, to_pbtxt
from trtllm_engram.builder.prepare import prepare
from trtllm_engram.builder.triton import Serving, python_config
from trtllm_engram.builder.triton_tensorrt import no_past, tensorrt_config
from trtllm_engram.plugins import library_path
from trtllm_engram.runtime import Tables, open_store
from trtllm_engram.runtime.bench import serving
from trtllm_engram.runtime.cli import triton as cli_triton
from trtllm_engram.runtime.engine import TensorInfo
from trtllm_engram.runtime.hidden import SeededHidden
from trtllm_engram.runtime.pieces import Executor, Piece
from trtllm_engram.runtime.session import EngramSession
from trtllm_engram.runtime.triton.settings import Instance, Settings

pytest_plugins = ["command_line_fixtures"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces")
    prepare(small_checkpoint(folder / "checkpoint"), folder / "store")
    return open_store(folder / "store")


@pytest.fixture(scope="module")
def tables(store):
    with Tables.of_store(store) as tables:
        yield tables


def test_pbtxt():
    message = {
        "name": 'a "b"\n',
        "count": 2,
        "on": True,
        "kind": Word("KIND_CPU"),
        "dims": [-1, 4],
        "inner": {"empty": {}},
        "many": [{"x": 1}, {"x": 2}],
    }
    assert to_pbtxt(message) == (
        'name: "a \\"b\\"\\n"\ncount: 2\non: true\nkind: KIND_CPU\ndims: [-1, 4]\n'
        "inner {\n  empty {\n  }\n}\nmany {\n  x: 1\n}\nmany {\n  x: 2\n}\n"
    )


def test_a_repository(run, files):
    code, out, _ = run("triton", "store", "--model-repository", "models", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["folder"] == "models/engram"
    assert document["launch"].endswith(f" tritonserver --model-repository='{files}/models'")
    assert names_below(files / "models") == [
        "engram",
        "engram/1",
        "engram/1/model.py",
        "engram/config.pbtxt",
    ]
    compile((files / "models/engram/1/model.py").read_text(), "model.py", "exec")
    config = (files / "models/engram/config.pbtxt").read_text()
    assert f'string_value: "{files}/store"' in config


TENSORRT = ("--form", "tensorrt", "--engine", "text")
MAX_TOKENS = ("--max-tokens", "131")


def test_a_repository_of_the_tensorrt_form(run, files):
    words = ("triton", "store", "--model-repository", "trt", "--device", "cuda:1,cuda:3")
    code, out, _ = run(*words, *TENSORRT, *MAX_TOKENS, "--numa", "interleave", "--json")
    assert code == 0
    assert names_below(files / "trt/engram") == [
        "1",
        "1/model.plan",
        "batchstrategy.so",
        "config.pbtxt",
        "initial_state",
        "initial_state/no_past",
        "tables.toml",
    ]
    assert (files / "trt/engram/1/model.plan").read_bytes() == (files / "text").read_bytes()
    assert (files / "trt/engram/batchstrategy.so").samefile(library_path())
    config = (files / "trt/engram/config.pbtxt").read_text()
    assert 'key: "max_tokens"\n  value {\n    string_value: "131"\n' in config
    tables = files / "trt/engram/tables.toml"
    launch = json.loads(out)["launch"]
    assert launch.startswith(f"TRTLLM_ENGRAM_TABLES='{tables}' tritonserver ")
    assert launch.endswith(f"--backend-config=tensorrt,plugins={library_path()}")
    with Tables.from_toml(tables) as bound:
        described = bound.describe()
    assert {name: one["layer"] for name, one in described.items()} == {"engram_1": 1, "engram_5": 5}
    assert {one["numa"] for one in described.values()} == {"interleave"}


def stand_in(store, most_requests=64, **changes):
    """An engine of `build --flat-hidden`, as runtime.engine tells of it; TensorRT's own are in
    test_triton_tensorrt.py."""
    config = store.config
    window = TensorInfo("int32", (None, config.max_ngram_size - 1))
    tokens = TensorInfo("int32", (None,))
    inputs = {"token_ids": tokens, "positions": TensorInfo("int64", (None,)), "cu_seqlens": tokens}
    inputs["lookback_ids"] = window
    outputs = {"next_lookback_ids": window}
    residual = (None, config.hc_mult, config.hidden_size)
    for layer in config.layer_ids:
        inputs[f"layers.{layer}.hidden"] = TensorInfo("bfloat16", (None,))
        outputs[f"layers.{layer}.hidden_out"] = TensorInfo("bfloat16", residual)
    profiles = [
        input_shapes(store, ModelOptions(flat_hidden=True), tokens, most_requests)
        for tokens in (64, 128)
    ]
    engine = SimpleNamespace(inputs=inputs, outputs=outputs, num_profiles=2)
    engine.shape_range = lambda name, profile: ((0,), profiles[profile][name])
    for key, value in changes.items():
        getattr(engine, key).update(value)
    return engine


def test_no_more_tokens_than_the_engine_takes(run, files, monkeypatch):
    engine = stand_in(open_store(files / "store"))
    monkeypatch.setattr(cli_triton, "Engine", lambda plan: engine)
    words = ("triton", "store", "--model-repository", "sized", *TENSORRT)
    code, _, err = run(*words, *MAX_TOKENS)
    assert code == 2
    assert only_line(err).endswith("--max-tokens: expected at most text's 128, found 131")
    for name, options, expected in (("all", (), 128), ("fewer", ("--max-tokens", "100"), 100)):
        code, out, _ = run(*words, *options, "--name", name)
        assert code == 0
        assert "not checked" not in out
        config = (files / "sized" / name / "config.pbtxt").read_text()
        assert f'key: "max_tokens"\n  value {{\n    string_value: "{expected}"\n' in config


UNFIT = {
    "another hidden size": (
        {"inputs": {"layers.5.hidden": TensorInfo("bfloat16", (None, 2, 65))}},
        (),
        "text: layers.5.hidden: expected bfloat16 ['any'], of `build --flat-hidden` for this "
        "store, found bfloat16 ['any', 2, 65]",
    ),
    "another layer": (
        {"inputs": {"layers.6.hidden": TensorInfo("bfloat16", (None,))}},
        (),
        "layers.5.hidden, of `build --flat-hidden` for this store, found token_ids,",
    ),
    "another window": (
        {"inputs": {"lookback_ids": TensorInfo("int32", (None, 3))}},
        (),
        "text: lookback_ids: expected int32 ['any', 2], of",
    ),
    "another dtype": ({}, ("--hidden-dtype", "float16"), "layers.1.hidden: expected float16 ['any"),
    "no lookback": (
        {"outputs": {"next_lookback_ids": TensorInfo("int64", (None, 2))}},
        (),
        "text: expected an output next_lookback_ids int32, of",
    ),
    "too many requests": (
        {},
        ("--max-batch", "65"),
        "--max-batch: expected at most text's 64, fou",
    ),
}


@pytest.mark.parametrize(
    ("options", "found"), [((), 64), (("--max-batch", "7"), 7)], ids=["default", "given"]
)
@pytest.mark.parametrize("most", [8, 100])
def test_the_default_of_max_batch_follows_the_engine(run, files, monkeypatch, options, found, most):
    """Where the engine takes fewer requests than that."""
    store = open_store(files / "store")
    engine = stand_in(store, most_requests=most)
    monkeypatch.setattr(cli_triton, "Engine", lambda plan: engine)
    name = f"{most}-{found}"
    words = ("triton", "store", "--model-repository", "batches", "--name", name, *TENSORRT)
    assert run(*words, *options)[0] == 0
    config = (files / "batches" / name / "config.pbtxt").read_text()
    assert f"\nmax_batch_size: {min(found, most)}\n" in f"\n{config}"


@pytest.mark.parametrize("kept", [(), ("--sequences",)], ids=["alone", "sequences"])
@pytest.mark.parametrize(("changes", "options", "said"), UNFIT.values(), ids=UNFIT.keys())
def test_an_engine_that_does_not_fit_is_refused(
    run, files, monkeypatch, changes, options, said, kept
):
    engine = stand_in(open_store(files / "store"), **changes)
    monkeypatch.setattr(cli_triton, "Engine", lambda plan: engine)
    words = ("triton", "store", "--model-repository", "unfit", *TENSORRT)
    code, _, err = run(*words, *options, *kept)
    assert code == 2
    assert said in only_line(err)
    assert not (files / "unfit").exists()


def test_an_engine_with_values_of_another_stream_is_refused(run, files, monkeypatch):
    store = open_store(files / "store")
    engine = stand_in(store)
    whole = engine.shape_range

    def shape_range(name, profile):
        least, most = whole(name, profile)
        return least, (most[0] + 2,) if name == "layers.5.hidden" else most

    engine.shape_range = shape_range
    monkeypatch.setattr(cli_triton, "Engine", lambda plan: engine)
    code, _, err = run("triton", "store", "--model-repository", "values", *TENSORRT)
    assert code == 2
    values = 64 * store.config.hc_mult * store.config.hidden_size
    assert f"text: layers.5.hidden: expected {values} values of 64 tokens, as" in only_line(err)


def test_an_engine_of_another_store_is_refused(run, files):
    """By the fingerprint in it, which needs no TensorRT; the rest is said to be unchecked."""
    words = ("triton", "store", "--model-repository", "prints", "--form", "tensorrt", *MAX_TOKENS)
    (files / "other.plan").write_bytes(b"\0" + b"5" * 64 + b"\0")
    code, _, err = run(*words, "--engine", "other.plan")
    assert code == 2
    assert only_line(err).endswith(f"found one of {'5' * 64}")
    own = open_store(files / "store").manifest.fingerprint
    (files / "own.plan").write_bytes(b"5" * 64 + own.encode())
    code, out, _ = run(*words, "--engine", "own.plan", "--json")
    assert code == 0
    assert json.loads(out)["engine"].startswith("not checked: engine: ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device", "cuda:1,cuda:0,cuda:1"), "--device: expected each GPU once, found cuda:1,cu"),
        (("--max-batch", "4097"), "--max-batch: expected at most 4096 with --form tensorrt, found"),
        (("--numa", "nodes"), "error: table 'engram_1': numa: expected \"default\""),
        (("--scales", "host"), "error: table 'engram_1': scales: expected host with placement dis"),
    ],
)
def test_what_the_tensorrt_form_refuses(run, files, options, said):
    words = ("triton", "store", "--model-repository", "refused", *TENSORRT, *MAX_TOKENS)
    code, _, err = run(*words, *options)
    assert code == 2
    assert said in only_line(err)
    assert not (files / "refused").exists()


@pytest.mark.parametrize("version", ["1.26.4", "2.3.1"])
def test_text_with_numpy_2_is_said_to_be_refused(run, files, monkeypatch, version):
    monkeypatch.setattr(np, "__version__", version)
    for options, is_said in (((), version[0] == "2"), (("--no-text",), False)):
        words = ("--name", f"numpy-{version}-{len(options)}", *options)
        code, out, _ = run("triton", "store", "--model-repository", "texts", *words)
        assert code == 0
        assert ("needs numpy below 2" in out) == is_said


def test_hot_rows_of_the_python_form(run, files):
    """CPUs make no use of them, but the tables are bound as on a GPU."""
    code, _, err = run("tables", "count", "store", "--text", "text", "--output", "hot.npy")
    assert (code, err) == (0, "")
    words = ("triton", "store", "--model-repository", "hot")
    options = ("--hot-rows", "hot.npy", "--hot-gib", "0.001", "--hot-adaptive", "0.5")
    assert run(*words, *options)[0] == 0
    config = (files / "hot/engram/config.pbtxt").read_text()
    pattern = r'key: "(\S+)"\n +value \{\n +string_value: "(.*)"'
    settings = Settings.of_parameters(dict(re.findall(pattern, config)))
    wanted = {"hot_rows": str(files / "hot.npy"), "hot_gib": 0.001, "hot_adaptive": 0.5}
    assert settings.table == wanted
    with Tables.of_store(open_store(settings.store), **settings.table) as bound:
        for one in bound.describe().values():
            assert 0 < one["hot"]["num_rows"] <= one["hot"]["capacity"] <= 0.001 * 2**30 / 64


def test_sequences_of_the_tensorrt_form_have_a_front(run, files):
    """Triton refuses a model with a strategy."""
    words = ("triton", "store", "--model-repository", "kept", *TENSORRT, *MAX_TOKENS)
    assert run(*words, "--sequences")[0] == 0
    assert "batchstrategy.so" not in names_below(files / "kept/engram")
    assert (files / "kept/engram/libtriton_tensorrt.so").samefile(library_path())
    config = (files / "kept/engram/config.pbtxt").read_text()
    assert 'key: "max_tokens"\n  value {\n    string_value: "131"\n' in config


def test_tensorrt_config(store):
    """Every input of an engine of `build --flat-hidden` has its place, in graphs too."""
    alone = tensorrt_config(store.config, Serving(gpus=(0,), max_batch=8))
    kept = tensorrt_config(store.config, Serving(gpus=(0,), max_batch=8, sequences=True))
    options = ModelOptions(flat_hidden=True)
    for size, graph in zip((1, 8), alone["optimization"]["cuda"]["graph_spec"], strict=True):
        shapes = input_shapes(store, options, size, size)
        batched = {"lookback_ids"}  # its first dimension is the batch's
        expected = {name: list(shape[name in batched :]) for name, shape in shapes.items()}
        assert {one["key"]: one["value"]["dim"] for one in graph["input"]} == expected
        assert graph["batch_size"] == size
    assert names(alone, "input")[-1] == "lookback_ids"
    assert "lookback_ids" not in names(kept, "input")
    (state,) = kept["sequence_batching"]["state"]
    assert (state["input_name"], state["output_name"]) == ("lookback_ids", "next_lookback_ids")
    assert no_past(store.config) == np.array([-1, -1], np.int32).tobytes()


def test_a_model_of_a_name_that_is_taken_is_refused(run, files):
    words = ("triton", "store", "--model-repository", "taken", "--name", "one")
    assert run(*words)[0] == 0
    before = (files / "taken/one/config.pbtxt").read_text()
    code, _, err = run(*words, "--instances", "3")
    assert code == 2
    assert "taken/one: expected a new or empty folder" in only_line(err)
    assert (files / "taken/one/config.pbtxt").read_text() == before


def names(message, key):
    return [one["name"] for one in message[key]]


def test_sequences_need_no_lookback(store):
    alone = python_config(store.config, Serving())
    assert {"lookback_ids", "position", "text"} < set(names(alone, "input"))
    assert "next_lookback_ids" in names(alone, "output")
    assert "dynamic_batching" in alone
    kept = python_config(store.config, Serving(sequences=True, text=False))
    assert not {"lookback_ids", "position", "text"} & set(names(kept, "input"))
    assert "next_lookback_ids" not in names(kept, "output")
    assert "dynamic_batching" not in kept


def test_settings_are_read_as_they_were_written():
    table = {"numa": "local", "hot_gib": 0.25}
    given = Settings("/store", engine="/e.plan", max_tokens=7, table=table)
    assert Settings.of_parameters(given.parameters()) == given


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "expected a store"),
        ({"store": "s", "sotre": "t"}, "found 'sotre'"),
        ({"store": "s", "max_tokens": "many"}, "expected a number, found 'many'"),
        ({"store": "s", "max_tokens": "0"}, "expected 1 to"),
        ({"store": "s", "table.hot_gib": "much"}, "hot_gib: expected a number, found 'much'"),
        ({"store": "s", "table.hot_adaptive": "half"}, "adaptive: expected a number, found 'half'"),
    ],
)
def test_bad_settings(parameters, message):
    with refusal(message):
        Settings.of_parameters(parameters)


@pytest.mark.parametrize(
    ("kind", "device", "name", "place"),
    [
        ("CPU", 0, "m_0_0", ("cpu", 0, 2)),
        ("CPU", 0, "m_0_1", ("cpu", 1, 2)),
        ("GPU", 5, "m_0_0", ("cuda:5", 2, 4)),
        ("GPU", 3, "m_0_1", ("cuda:3", 1, 4)),
    ],
)
def test_the_instances_of_a_model_are_a_group(kind, device, name, place):
    group = {"count": 2} | ({"gpus": [3, 5]} if kind == "GPU" else {})
    args = {
        "model_config": json.dumps({"instance_group": [group]}),
        "model_instance_name": name,
        "model_instance_kind": kind,
        "model_instance_device_id": str(device),
        "model_name": "m",
        "model_version": "3",
    }
    instance = Instance.of_args(args)
    assert (instance.device, instance.rank, instance.size) == place
    assert (instance.model, instance.version) == ("m", "3")


@given(st.data())
@settings(max_examples=15)
def test_pieces_side_by_side_are_what_one_session_makes(store, tables, data):
    """Texts cut anywhere, their pieces packed as they come: each token's bits are the same."""
    session = EngramSession(store)
    hidden = SeededHidden(store.config)
    layers = store.config.layer_ids
    executor = Executor(EngramSession(store, "cpu", tables), max_tokens=13, max_pieces=3)
    texts = data.draw(
        st.lists(
            st.lists(st.integers(0, store.token_map.size - 1), max_size=20), min_size=1, max_size=5
        )
    )
    pieces, wanted = [], []
    for text in texts:
        ids = np.array(text, np.int32)
        (whole,) = list(session.run(ids, hidden)) or [None]
        lookback = np.full(store.config.max_ngram_size - 1, -1, np.int32)
        start = 0
        while start < ids.size:
            stop = data.draw(st.integers(start, min(start + 13, ids.size)))
            states = {layer: hidden(layer, start, stop) for layer in layers}
            pieces.append(Piece(ids[start:stop], start, lookback, states))
            wanted.append((whole, start, stop))
            lookback, start = pieces[-1].next_lookback_ids, stop
    for made, (whole, start, stop) in zip(
        executor.run(pieces, with_rows=True), wanted, strict=True
    ):
        assert np.array_equal(made.hash_ids, whole.hash_ids[start:stop])
        for layer in layers:
            for found, expected in (
                (made.rows[layer], whole.rows[layer]),
                (made.hidden[layer], whole.hidden[layer]),
            ):
                assert np.array_equal(found.view(np.uint16), expected[start:stop].view(np.uint16))


def test_a_piece_of_too_many_tokens(store, tables):
    executor = Executor(EngramSession(store, "cpu", tables), max_tokens=3)
    piece = Piece(np.zeros(4, np.int32), 0, np.full(2, -1, np.int32), {})
    with refusal("expected at most 3 in a request, found 4"):
        executor.run([piece])


def test_growth_of_memory_that_was_seldom_looked_at():
    looks = [serving.Memory(second, pss) for second, pss in ((0, 100), (1.5, 200), (10, 210))]
    assert serving.growth(looks) == pytest.approx(0.05)
