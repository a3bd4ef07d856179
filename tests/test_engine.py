# SPDX-License-Identifier: Apache-2.0
"""Engines of whole stores on a GPU: build, run, capture, other processes, ONNX, the commands."""

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from engine_cases import (
    CHECKED,
    MAX_BATCH,
    MAX_TOKENS,
    build_plan,
    check,
    feed_of,
    on_torch,
    run,
    same,
)
from engines import TEXT, V4_COLUMNS, bits, on_gpu, skip_without_fp8, small_store

from trtllm_engram.builder.layers import table_name
from trtllm_engram.builder.model import HIDDEN_DTYPES, ModelOptions, hidden_name, hidden_out_name
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import Tables
from trtllm_engram.runtime.compare import Reference, compare
from trtllm_engram.runtime.compare.report import HIDDEN_LIMIT_BF16_ULPS

pytest_plugins = "engine_fixtures"
EXAMPLE = Path(__file__).parents[1] / "examples/tensorrt_network.py"


@on_gpu
@pytest.mark.parametrize(
    "size",
    [(0, 0), (0, 1), (1, 1), (MAX_BATCH, MAX_BATCH), (37, 3), (127, 8), (MAX_TOKENS, MAX_BATCH)],
)
def test_matches_the_reference(store, engine, size):
    """No requests, no tokens, one, a prime number, and both profiles' ends."""
    feed = feed_of(store, *size)
    check(store, feed, run(engine, feed))


@on_gpu
def test_every_profile_takes_a_decode_step(store, engine):
    feed = feed_of(store, 3, 3)
    for profile in range(engine.num_profiles):
        check(store, feed, engine.execution(profile).run(feed))


@on_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("sizes", [{"hc_mult": 1, "hidden_size": 80}, {"hidden_size": 641}])
def test_other_sizes_and_dtypes(tmp_path, sizes, dtype):
    """From tables in host memory and, by the same plan, in GPU memory."""
    from trtllm_engram.runtime.engine import Engine

    store = small_store(tmp_path, **sizes)
    options = ModelOptions(dtype, check_outputs=True)
    feed = feed_of(store, 37, 3, options=options)
    plan = build_plan(store, options=options)
    for placement in ("host", "device"):
        with Tables.of_store(store, placement=placement, scales="device"):
            check(store, feed, run(Engine(plan), feed))


@on_gpu
def test_whole_prompts(store):
    from trtllm_engram.runtime.engine import Engine

    options = ModelOptions(history="whole_prompt", check_outputs=True)
    with Tables.of_store(store):
        engine = Engine(build_plan(store, "whole.plan", options))
        assert "lookback_ids" not in engine.inputs
        feed = feed_of(store, 37, 3, options=options)
        check(store, feed, run(engine, feed))


@on_gpu
def test_flat_residual_streams(store, engine):
    """As Triton joins those of a batch: the same bits come out."""
    from trtllm_engram.runtime.engine import Engine

    options = ModelOptions(check_outputs=True, flat_hidden=True)
    flat = Engine(build_plan(store, "flat.plan", options))
    for size in ((0, 1), (1, 1), (37, 3)):
        feed = feed_of(store, *size)
        found = run(flat, {name: flattened(name, array) for name, array in feed.items()})
        for name, array in run(engine, feed).items():
            np.testing.assert_array_equal(bits(found[name]), bits(array), err_msg=name)


def flattened(name, array):
    return array.reshape(-1) if name.endswith(".hidden") else array


@on_gpu
@pytest.mark.unsanitized
@pytest.mark.parametrize(
    ("projection", "limit"), [("tensorrt", HIDDEN_LIMIT_BF16_ULPS), ("fp8", 64.0)]
)
def test_other_projections(store, projection, limit):
    from trtllm_engram.runtime.engine import Engine

    if projection == "fp8":
        skip_without_fp8()
    amax = {"rows_amax": 1024.0} if projection == "fp8" else {}
    with Tables.of_store(store):
        plan = build_plan(store, f"{projection}.plan", projection=projection, **amax)
        feed = feed_of(store, 37, 3)
        check(store, feed, run(Engine(plan), feed), limit)


@on_gpu
def test_version_compatible(store):
    """The flags are set and such a plan is built; it runs in the lean runtime, which not every
    TensorRT brings."""
    from trtllm_engram.builder.engine import EngineBuilder
    from trtllm_engram.runtime.engine import Engine

    builder = EngineBuilder(version_compatible=True)
    flags = builder.trt.BuilderFlag
    assert builder.config.get_flag(flags.VERSION_COMPATIBLE)
    assert builder.config.get_flag(flags.EXCLUDE_LEAN_RUNTIME)
    plan = build_plan(store, "compatible.plan", version_compatible=True)
    assert plan.stat().st_size > 0
    try:
        ctypes.CDLL(f"libnvinfer_lean.so.{builder.trt.__version__.split('.')[0]}")
    except OSError:
        pytest.skip("this machine: no lean runtime of TensorRT")
    with Tables.of_store(store):
        engine = Engine(plan)
        feed = feed_of(store, 5, 2)
        check(store, feed, run(engine, feed))


@on_gpu
def test_true_shapes(tmp_path):
    """V4.1-Flash's layers, eager and replayed: hidden 5120, hc_mult 4, 24 columns of 256, two
    layers; small tables."""
    from trtllm_engram.runtime.engine import Engine

    sizes = {**V4_COLUMNS, "hidden_size": 5120, "engram_vocab_size": 14_000, "layers": (1, 14)}
    store = small_store(tmp_path, **sizes)
    with Tables.of_store(store, placement="device"):
        engine = Engine(build_plan(store))
        for size in [(1, 1), (MAX_BATCH, MAX_BATCH), (37, 3)]:
            feed = feed_of(store, *size)
            check(store, feed, run(engine, feed))
            check_replays(store, engine, size)


@on_gpu
def test_decode_equals_prefill(store, engine):
    """A text in one piece, and token by token with the engine's own lookback."""
    whole = feed_of(store, 37, 1)
    whole["positions"] = np.arange(37, dtype=np.int64)
    whole["lookback_ids"][:] = -1
    expected = run(engine, whole)
    decode = engine.execution(0)
    lookback = whole["lookback_ids"]
    steps = []
    for token in range(37):
        feed = {name: array[token : token + 1] for name, array in whole.items()}
        feed |= {"cu_seqlens": np.array([0, 1], np.int32), "lookback_ids": lookback}
        steps.append(decode.run(feed))
        lookback = steps[-1]["next_lookback_ids"]
    found = {
        name: np.concatenate([step[name] for step in steps])
        for name in expected
        if name != "next_lookback_ids"
    }
    np.testing.assert_array_equal(lookback, expected.pop("next_lookback_ids"))
    reference = Reference(store)(whole)
    magnitudes = {name: reference[name] for name in reference if name.endswith(".magnitude")}
    assert all(one.passed for one in compare(found, expected | magnitudes))


# CUDA graphs, streams, contexts.


@on_gpu
@pytest.mark.parametrize("size", [(0, 0), (0, 1), (1, 1), (MAX_BATCH, MAX_BATCH), (37, 3)])
def test_graph_replays_with_changed_inputs(store, engine, size):
    check_replays(store, engine, size)


def check_replays(store, engine, size):
    """A graph of this size replays, with changed inputs, what another context runs."""
    profile = 0 if size[0] <= MAX_BATCH else 1
    graph = engine.execution(profile).capture(on_torch(feed_of(store, *size)))
    eager = engine.execution(profile)
    for seed in (1, 2):
        inputs = on_torch(feed_of(store, *size, seed=seed))
        for name, tensor in inputs.items():
            graph.inputs[name].copy_(tensor)
        same(graph.replay(), eager.run(inputs))


@on_gpu
def test_capture_wants_arrays_on_the_gpu(store, engine):
    with pytest.raises(InputError, match=r"expected an array on the GPU, found numpy's"):
        engine.execution(0).capture(feed_of(store, 1, 1))


@on_gpu
def test_two_contexts_on_two_streams(store, engine):
    """Both run at once, over and over, and each gets its own results."""
    import torch

    feeds = [on_torch(feed_of(store, 37, 3, seed)) for seed in (1, 2)]
    expected = [engine.execution(1).run(feed) for feed in feeds]
    torch.cuda.synchronize()
    executions = [engine.execution(1) for _ in feeds]
    streams = [torch.cuda.Stream() for _ in feeds]
    found = [[], []]
    for _ in range(20):
        for index, stream in enumerate(streams):
            found[index].append(executions[index].run(feeds[index], stream=stream))
    for index, results in enumerate(found):
        for one in results:
            same(one, expected[index])


@on_gpu
def test_two_threads(store, engine):
    feeds = [feed_of(store, 37, 3, seed) for seed in (1, 2, 3)]
    results = [[], [], []]

    def work(index):
        execution = engine.execution(1)
        for _ in range(5):
            results[index].append(execution.run(feeds[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(feeds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for feed, found in zip(feeds, results, strict=True):
        assert len(found) == 5
        for one in found:
            check(store, feed, one)


@on_gpu
def test_outputs_of_the_caller(store, engine):
    import torch

    inputs = on_torch(feed_of(store, 5, 2))
    name = hidden_out_name(1)
    mine = torch.empty_like(inputs[hidden_name(1)])
    found = engine.execution(1).run(inputs, out={name: mine})
    assert found[name] is mine
    same(found, engine.execution(1).run(inputs))


# Plans in other processes.


def run_example():
    return subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=False)


@on_gpu
@pytest.mark.unsanitized
def test_example():
    """Eager and replayed outputs are spread alike."""
    done = run_example()
    assert done.returncode == 0, done.stderr
    eager, replayed = done.stdout.splitlines()
    assert eager == replayed


def test_example_without_a_gpu(monkeypatch):
    """One line of what it lacks, and exit code 1; and it is a short one."""
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run_example()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("expected a GPU and TensorRT: ")
    assert done.stderr.count("\n") == 1


_RELOAD = """
import hashlib, json, sys
import numpy as np
from trtllm_engram.runtime import Tables, open_store
from trtllm_engram.runtime.compare import make_feeds
from trtllm_engram.runtime.engine import Engine
store, plan, bind = open_store(sys.argv[1]), sys.argv[2], sys.argv[3] == "bind"
tables = Tables.of_store(store) if bind else None
feed = make_feeds(store, [(37, 3)], text=sys.argv[4])[0]
found = Engine(plan).execution(1).run(feed)
print(json.dumps({n: hashlib.sha256(a.tobytes()).hexdigest() for n, a in found.items()}))
"""


@on_gpu
@pytest.mark.parametrize("bound_by", ["python", "environment"])
def test_plan_in_a_fresh_process(store, plan, engine, tmp_path, bound_by):
    toml = tmp_path / "tables.toml"
    lines = ["format_version = 1"]
    for layer_id in store.config.layer_ids:
        lines += [
            f"[tables.{table_name(layer_id)}]",
            f'store = "{store.path}"',
            f"layer = {layer_id}",
        ]
    toml.write_text("\n".join(lines))
    toml.chmod(0o600)
    environment = dict(os.environ)
    if bound_by == "environment":
        environment["TRTLLM_ENGRAM_TABLES"] = str(toml)
    mode = "bind" if bound_by == "python" else "environment"
    done = subprocess.run(
        [sys.executable, "-c", _RELOAD, str(store.path), str(plan), mode, TEXT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = run(engine, feed_of(store, 37, 3))
    expected = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in found.items()}
    assert json.loads(done.stdout) == expected


# ONNX and the command line.


@on_gpu
@pytest.mark.unsanitized
def test_onnx_parser_gives_the_same(store, engine, tmp_path):
    from trtllm_engram.builder import onnx
    from trtllm_engram.builder.engine import EngineBuilder
    from trtllm_engram.builder.model import input_shapes
    from trtllm_engram.builder.tensorrt_log import tensorrt_logger
    from trtllm_engram.runtime.engine import Engine

    onnx.export(store, tmp_path / "engram.onnx", options=CHECKED, external=True)
    builder = EngineBuilder()
    parser = builder.trt.OnnxParser(builder.network, tensorrt_logger())
    parsed = parser.parse_from_file(str(tmp_path / "engram.onnx"))
    assert parsed, [parser.get_error(index).desc() for index in range(parser.num_errors)]
    most = input_shapes(store, CHECKED, MAX_TOKENS, MAX_BATCH)
    builder.add_profile(input_shapes(store, CHECKED, 0, 0), most, most)
    feed = feed_of(store, 37, 3)
    found = run(Engine(bytes(builder.serialize())), feed)
    expected = engine.execution(1).run(feed)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(bits(array), bits(expected[name]), err_msg=name)


@on_gpu
@pytest.mark.unsanitized
@pytest.mark.parametrize("dtype", HIDDEN_DTYPES)
def test_commands(store, tmp_path, capsys, dtype):
    """build, compare and run --engine, whose file is the same as the ops' in ids and rows."""
    from safetensors.numpy import load_file

    from trtllm_engram.runtime.cli import main

    plan, text = str(tmp_path / "cli.plan"), tmp_path / "text.txt"
    text.write_text("a pad 3 A 7 7 a 12 39 pad a a 1 2 3")
    sizes = ["--max-batch", "4", "--max-tokens", "40"]
    build = ["build", str(store.path), "--output", plan, "--check-outputs", *sizes]
    build += ["--hidden-dtype", dtype]
    assert main([*build, "--timing-cache", str(tmp_path / "timings")]) == 0
    capsys.readouterr()
    assert main(["compare", str(store.path), "--engine", plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    outputs = {}
    for name, options in (("engine", ["--engine", plan]), ("ops", ["--device", "cpu"])):
        file = str(tmp_path / f"{name}.safetensors")
        options += ["--text", str(text), "--rows", "--chunk", "4", "--output", file]
        assert main(["run", str(store.path), *options]) == 0
        outputs[name] = load_file(file)
    assert outputs["engine"]["layers.1.hidden"].dtype.name == dtype
    assert outputs["engine"].keys() == outputs["ops"].keys()
    for name, array in outputs["ops"].items():
        if not name.endswith("hidden"):
            np.testing.assert_array_equal(bits(outputs["engine"][name]), bits(array), err_msg=name)
