# SPDX-License-Identifier: Apache-2.0
"""What building and engines refuse, and how they say it."""

import contextlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from engine_cases import MAX_TOKENS, build_plan, check, feed_of
from engines import V4_COLUMNS, on_gpu, run_network, small_store
from fake_engine import FakeEngine, use_fake_tensorrt

from trtllm_engram.builder.layers import EngramLayer, engram_layers
from trtllm_engram.builder.model import ModelOptions, hidden_name, hidden_out_name
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import Tables
from trtllm_engram.runtime.engine_session import EngineSession
from trtllm_engram.runtime.hidden import SeededHidden

pytest_plugins = "engine_fixtures"


def test_projection_is_checked(store):
    with pytest.raises(InputError, match=r"^projection: expected one of plugin, tensorrt, fp8"):
        EngramLayer(store, 1, projection="cublas")
    with pytest.raises(InputError, match=r"^rows_amax: expected a positive number for fp8"):
        EngramLayer(store, 1, projection="fp8")
    fp8 = {"projection": "fp8", "rows_amax": 1024.0}
    expected = (
        r"^projection: expected a GPU of compute capability 8\.9 or later for fp8, found 8\.6$"
    )
    with pytest.raises(InputError, match=expected):
        EngramLayer(store, 1, **fp8, capability=(8, 6))
    for capability in (None, (8, 9), (10, 0)):
        assert EngramLayer(store, 1, **fp8, capability=capability).projection == "fp8"


def test_a_table_has_a_name(store):
    """Also where an ONNX model is written, which no creator checks."""
    with pytest.raises(InputError, match=r"^table: expected a name for layer 14, found none$"):
        engram_layers(store, {14: ""})


@pytest.mark.parametrize(
    "changes", [{"check_mxfp8": ""}, {"hidden_dtype": "int8"}, {"history": "kv"}]
)
def test_options_are_checked(changes):
    with pytest.raises(InputError, match=r"expected one of .*, found '"):
        ModelOptions(**changes)


def test_profiles_are_checked():
    from trtllm_engram.builder.engine import default_profiles

    with pytest.raises(InputError, match=r"^prefill: max_tokens: expected 1 to 2147483647, found"):
        default_profiles(8, 0)


def test_no_gpu_is_one_line(store):
    from trtllm_engram.builder.engine import build
    from trtllm_engram.runtime.devices import why_no_gpu
    from trtllm_engram.runtime.engine import Engine

    if not why_no_gpu():
        pytest.skip("there is a GPU")
    with pytest.raises(EngramError, match=r"^building: expected a usable GPU: "):
        build(store, "never.plan")
    with pytest.raises(EngramError, match=r"^engine: expected a usable GPU: "):
        Engine(b"")


def test_what_broke_a_capture_is_told(monkeypatch):
    """Not that the capture is invalid, which follows from it."""
    from trtllm_engram.runtime import engine

    called = []

    def cuda(function, *_):
        called.append(function)
        if function == "cudaStreamEndCapture":
            raise EngramError("cudaStreamEndCapture: cudaErrorStreamCaptureInvalidated")
        return 7

    def enqueue_on(_stream):
        raise EngramError("engine: TensorRT failed: EngramLookup: no table")

    monkeypatch.setattr(engine, "cuda", cuda)
    monkeypatch.setattr(engine, "constant", lambda name: name)
    monkeypatch.setattr(engine, "current_device", lambda _device: contextlib.nullcontext())
    execution = SimpleNamespace(engine=SimpleNamespace(device=0), enqueue_on=enqueue_on)
    with pytest.raises(EngramError, match=r"EngramLookup: no table$"):
        engine.Graph(execution, {}, {})
    assert called[-2:] == ["cudaStreamEndCapture", "cudaStreamDestroy"]


@pytest.mark.parametrize("dtype", ["INT8", "UINT8", "FP4"])
def test_a_type_without_arrays_is_told(monkeypatch, dtype):
    """By the tensor's name, in the engine of another builder."""
    from trtllm_engram.runtime import engine

    plan = SimpleNamespace(
        num_optimization_profiles=1,
        num_io_tensors=2,
        get_tensor_name=["ids", "mask"].__getitem__,
        get_tensor_shape=lambda _name: (-1, 3),
        get_tensor_dtype={"ids": "INT32", "mask": dtype}.__getitem__,
        get_tensor_mode=lambda _name: "INPUT",
    )
    trt = SimpleNamespace(
        Runtime=lambda _logger: SimpleNamespace(deserialize_cuda_engine=lambda _content: plan),
        DataType=SimpleNamespace(**{name: name for name in engine.TENSORRT.values()}),
        TensorIOMode=SimpleNamespace(INPUT="INPUT"),
    )
    monkeypatch.setattr(engine, "require_gpu", lambda _what: None)
    monkeypatch.setattr(engine, "import_tensorrt", lambda: trt)
    monkeypatch.setattr(engine, "tensorrt_logger", lambda: None)
    monkeypatch.setattr(engine, "register", lambda _trt: None)
    monkeypatch.setattr(engine, "current_device", lambda _device: contextlib.nullcontext())
    with pytest.raises(
        EngramError, match=rf"^plan: mask: expected a type of BF16, .* found {dtype}$"
    ):
        engine.Engine(b"")


def test_text_for_an_engine_is_checked(store, monkeypatch):
    """On the host: what a kernel finds wrong would be a failure at run time, not bad input."""
    use_fake_tensorrt(monkeypatch)
    engine = FakeEngine(store, ModelOptions())
    session = EngineSession(engine, store)
    ids = np.array([1, store.token_map.size], np.int32)
    with pytest.raises(InputError, match=r"^token ids: expected 0 to \d+, found"):
        next(session.run(ids, SeededHidden(store.config)))
    last = hidden_out_name(14)
    del engine.outputs[last]
    with pytest.raises(InputError, match=rf"^engine: expected an output {last} for this store, fo"):
        EngineSession(engine, store)


@on_gpu
def test_unbound_table(plan):
    """The text names the table that was looked for and what there is."""
    from trtllm_engram.runtime.engine import Engine

    with pytest.raises(EngramError, match=r"table 'engram_\d+': expected a bound name, found no"):
        Engine(plan).execution()


@on_gpu
def test_a_plan_that_a_plugin_refuses(store, plan, tmp_path):
    """In a process of its own, which TensorRT 10.6 would end if the plugin were not made."""
    spoilt = tmp_path / "spoilt.plan"
    fingerprint = store.manifest.fingerprint.encode()
    content = plan.read_bytes()
    assert fingerprint in content
    spoilt.write_bytes(content.replace(fingerprint, b"g" * 64))
    code = "import sys; from trtllm_engram.runtime.engine import Engine; Engine(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(spoilt)], capture_output=True, text=True, check=False
    )
    said = f"EngramError: {spoilt}: TensorRT failed: EngramLookup.createPlugin: field 'fingerprint'"
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr


@on_gpu
def test_building_needs_no_table_and_opens_none(store):
    from trtllm_engram.runtime.tables import describe_tables

    build_plan(store, "unbound.plan", tables={1: "nowhere"})
    assert describe_tables() == {}


@on_gpu
@pytest.mark.parametrize(
    ("changes", "layer", "expected"),
    [
        ({"engram_vocab_size": 181}, 1, "expected layout fingerprint"),
        ({}, 14, "layer: expected 1, found 14"),
    ],
    ids=["fingerprint", "layer"],
)
def test_wrong_table(store, plan, tmp_path, changes, layer, expected):
    from trtllm_engram.runtime.engine import Engine

    other = small_store(tmp_path, **{**V4_COLUMNS, "layers": (1, 14), **changes})
    with Tables() as tables:
        tables.bind("engram_1", other, layer=layer)
        tables.bind("engram_14", store, layer=14)
        with pytest.raises(EngramError, match=expected):
            Engine(plan).execution()


@on_gpu
@pytest.mark.parametrize("op", ["lookup", "prefetch"])
def test_ids_of_another_layer(store, op):
    """Every id of layer 1 is a row of layer 14's table too: only the layout can tell."""
    from trtllm_engram.builder import network

    names = {"table": "engram_14", "fingerprint": store.manifest.fingerprint, "layer": 14}
    names |= {"layer_idx": 0, "head_dim": store.config.head_dim}
    ids = np.zeros((3, 2, store.config.num_columns), np.int32)

    def make(net, ids):
        started = network.prefetch(net, ids, **names) if op == "prefetch" else ()
        return {"rows": network.lookup(net, ids, **names, prefetched=started)}

    with Tables.of_store(store):
        told = r"field 'layer_idx': expected 1, the place of layer 14 among the 2 of the layout"
        with pytest.raises(EngramError, match=told):
            run_network(make, {"ids": ids})


@on_gpu
def test_tables_shared_and_outliving_their_names(store, plan):
    """Two engines on one table, which stays while they use it, though its name is free again."""
    from trtllm_engram.runtime.engine import Engine

    feed = feed_of(store, 5, 2)
    with Tables.of_store(store):
        executions = [Engine(plan).execution(1) for _ in range(2)]
    for execution in executions:
        check(store, feed, execution.run(feed))
    with Tables.of_store(store), pytest.raises(InputError, match="expected a free name"):
        Tables.of_store(store)


def _drop(feed):
    del feed["positions"]


def _rename(feed):
    feed["position"] = feed.pop("positions")


def _half(feed):
    feed[hidden_name(1)] = feed[hidden_name(1)].astype(np.float16)


def _long_ids(feed):
    feed["token_ids"] = feed["token_ids"].astype(np.int64)


def _too_many(feed):
    feed["token_ids"] = np.zeros(MAX_TOKENS + 1, np.int32)


def _flat(feed):
    feed[hidden_name(1)] = feed[hidden_name(1)].reshape(5, -1)


@on_gpu
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_drop, "engine: positions: expected int64"),
        (_rename, "engine: expected inputs of token_ids, .*found 'position'"),
        (_half, r"engine: layers\.1\.hidden: expected bfloat16 or uint16 .*found float16"),
        (_long_ids, r"engine: token_ids: expected int32 \[any\], found int64"),
        (_too_many, r"token_ids: expected a shape from \[0\] to \[131\] in profile 1"),
        (_flat, r"engine: layers\.1\.hidden: expected .*, found bfloat16 \[5, 640\]"),
    ],
)
def test_wrong_inputs(store, engine, spoil, expected):
    feed = feed_of(store, 5, 2)
    spoil(feed)
    with pytest.raises(InputError, match=expected):
        engine.execution(1).run(feed)


@pytest.mark.parametrize("method", ["run", "capture"])
def test_unknown_outputs_are_refused(method):
    """Before anything runs: the caller's array would stay as it was."""
    from trtllm_engram.runtime.engine import Execution

    execution = Execution.__new__(Execution)  # the constructor takes a GPU
    execution.engine = SimpleNamespace(outputs={"hash_ids": None, "rows": None})
    expected = r"^engine: out: expected outputs of hash_ids, rows; found 'row'$"
    with pytest.raises(InputError, match=expected):
        getattr(execution, method)({}, out={"rows": None, "row": None})


@on_gpu
def test_tensors_of_different_lengths(store, engine):
    """Four tokens' streams for five tokens' ids."""
    feed = feed_of(store, 5, 2)
    feed[hidden_name(1)] = feed[hidden_name(1)][:4]
    refused = r"TensorRT failed: (?!it said nothing)|expected a known shape"
    with pytest.raises(EngramError, match=refused):
        engine.execution(1).run(feed)


@on_gpu
def test_bad_token_id_is_told_once(store, engine):
    """The step goes on with no rows for that token; the next call tells."""
    feed = feed_of(store, 5, 2)
    good = feed["token_ids"].copy()
    feed["token_ids"][3] = 1_000_000_000
    execution = engine.execution(1)
    with pytest.raises(EngramError, match="token"):
        execution.run(feed)
    feed["token_ids"] = good
    check(store, feed, execution.run(feed))


@on_gpu
@pytest.mark.parametrize("content", [b"", b"no plan at all" * 100])
def test_no_plan(tmp_path, content):
    from trtllm_engram.runtime.engine import Engine

    path = tmp_path / "bad.plan"
    path.write_bytes(content)
    with pytest.raises(EngramError, match=r"bad\.plan: TensorRT failed: "):
        Engine(path)
