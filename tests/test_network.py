# SPDX-License-Identifier: Apache-2.0
"""builder.network: nodes without TensorRT; on a GPU an engine of each function against the ops."""

import sys

import fake_tensorrt
import generators
import ml_dtypes
import numpy as np
import pytest
from engine_cases import host, on_torch
from engines import (
    V4_COLUMNS,
    SmallEngine,
    bits,
    on_gpu,
    run_network,
    skip_without_fp8,
    small_store,
    tensor_bytes,
)
from generators import HASH_INPUTS

from trtllm_engram.builder import network, tensorrt_log
from trtllm_engram.builder.dtypes import numpy_dtype
from trtllm_engram.plugins import library_path
from trtllm_engram.plugins.errors import EngramError
from trtllm_engram.runtime import Tables, open_store, ops

BF16 = ml_dtypes.bfloat16
CASES = [
    (name, case) for name in ("hash_full", "hash_tiny") for case in ("fresh", "decode", "dead")
]
CASES += [("hash_full", "chunk"), ("hash_tiny", "chunk")]


@pytest.fixture
def rng():
    return np.random.default_rng(4)


def test_constants_that_differ_lie_at_addresses_that_differ(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.make())
    net, whole = fake_tensorrt.Network(), np.arange(12, dtype=np.float32)
    arrays = [whole, whole[:5], whole, whole.reshape(3, 4), whole.view(np.int32)]
    for array in arrays:
        network.constant(net, array)
    for weights, array in zip(net.constants, arrays, strict=True):
        np.testing.assert_array_equal(weights.array(), array.ravel())
    first, part, again, shaped, typed = (weights.address for weights in net.constants)
    assert first == again == shaped == whole.ctypes.data
    assert len({first, part, typed}) == 3


def test_plugins_are_registered_where_they_are_not_known(monkeypatch, rng):
    """Once: TensorRT says an error of each that it is given again."""
    trt = fake_tensorrt.make()
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    net = fake_tensorrt.Network()
    weight = bf16(rng, 2, 64)
    inputs = [
        net.add_input(name, "BF16", shape) for name, shape in (("h", (3, 2, 64)), ("k", (3, 192)))
    ]
    for _ in range(2):
        network.gate(net, *inputs, weight, weight, 1e-6)
    assert trt.get_plugin_registry().libraries == [str(library_path())]


def test_why_a_creator_refuses_is_told(monkeypatch, rng):
    trt = fake_tensorrt.make()
    monkeypatch.setitem(sys.modules, "tensorrt", trt)

    def refuse(_creator, name, _fields, _phase):
        tensorrt_log._heard(f"{name}.createPlugin: field 'eps': expected a number of at least 0")

    monkeypatch.setattr(fake_tensorrt.Creator, "create_plugin", refuse)
    said = r"^EngramGate: TensorRT failed: EngramGate\.createPlugin: field 'eps': expected a number"
    with pytest.raises(EngramError, match=said):
        network.gate(fake_tensorrt.Network(), *map(bf16, [rng] * 4, [1] * 4), -1.0)


def bf16(rng, *shape):
    return generators.bf16(rng, *shape).view(BF16)


# Engines.


@on_gpu
@pytest.mark.parametrize(("name", "case"), CASES)
def test_hash_golden(name, case):
    arrays, _ = generators.golden(name)
    layout, token_map = generators.golden_layout(name), generators.golden_token_map()
    inputs = {key: arrays[f"{case}.{key}"] for key in HASH_INPUTS}

    def make(net, **tensors):
        made = network.hash_ids(net, layout, token_map, **tensors, next_lookback=True)
        return {"ids": made.ids, "next": made.next_lookback_ids}

    found = run_network(make, inputs, least={"cu_seqlens": 1})
    np.testing.assert_array_equal(found["ids"], arrays[f"{case}.hash_ids"])
    expected = np.full_like(inputs["lookback_ids"], -7)
    ops.hash_ids(layout, token_map, **inputs, next_lookback_out=expected)
    np.testing.assert_array_equal(found["next"], expected)


@on_gpu
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_hash_without_boundaries(rng, dtype):
    """One token per request, whole prompts: neither cu_seqlens nor lookback."""

    layout, token_map = generators.small_layout(), generators.small_token_map()
    token_ids = rng.integers(0, generators.VOCAB_SIZE, 11).astype(np.int32)
    inputs = {"token_ids": token_ids, "positions": np.arange(11).astype(dtype)}
    found = run_network(
        lambda net, **tensors: {"ids": network.hash_ids(net, layout, token_map, **tensors).ids},
        inputs,
    )
    expected = ops.hash_ids(layout, token_map, **inputs, cu_seqlens=None)
    np.testing.assert_array_equal(found["ids"], expected)


@pytest.fixture(scope="module")
def golden_store(tmp_path_factory):
    """A store whose layer 1 begins with the golden vectors' table; the rows after it are zero."""
    folder = tmp_path_factory.mktemp("golden")
    arrays, _ = generators.golden("lookup")
    small_store(folder, **V4_COLUMNS)
    for name, rows in (("weight", arrays["weight"]), ("scale", arrays["scale"])):
        tensor = tensor_bytes(folder / "checkpoint", f"1.engram.embed.{name}")
        tensor[:] = 0
        tensor[: len(rows)] = rows
        tensor.flush()
    from trtllm_engram.builder.prepare import prepare

    prepare(folder / "checkpoint", folder / "golden_store")
    return open_store(folder / "golden_store")


@on_gpu
@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("form", ["bf16", "mxfp8_128x4", "mxfp8_linear", "mxfp8_words"])
def test_lookup_golden(golden_store, form, placement):
    arrays, _ = generators.golden("lookup")
    common = {
        "table": "golden",
        "fingerprint": golden_store.manifest.fingerprint,
        "layer": 1,
        "layer_idx": 0,
        "head_dim": 256,
    }

    def make(net, ids):
        if form == "bf16":
            return {"rows": network.lookup(net, ids, **common)}
        order = "linear" if form == "mxfp8_linear" else "128x4"
        words = "words" if form == "mxfp8_words" else "fp8"
        values, scales = network.lookup_mxfp8(net, ids, **common, scale_order=order, values=words)
        return {"values": values, "scales": scales}

    with Tables() as tables:
        tables.bind("golden", golden_store, layer=1, placement=placement)
        found = run_network(make, {"ids": arrays["ids"][:, None]})
    if form == "bf16":
        np.testing.assert_array_equal(bits(found["rows"]), arrays["bf16"])
        return
    np.testing.assert_array_equal(found["values"].view(np.uint8), arrays["mxfp8_values"])
    scales = found["scales"].view(np.uint8)
    if form == "mxfp8_linear":
        table = (arrays["weight"], arrays["scale"])
        _, expected = ops.lookup_mxfp8(*table, arrays["ids"])
        np.testing.assert_array_equal(scales, expected)
    else:
        np.testing.assert_array_equal(scales, arrays["mxfp8_scales_128x4"])


def check_project(rng, out_features, limit, project, **options):
    """Engines of project(network, x, weight, scale), at most `limit` BF16 ulps from the CPU's."""
    weight, scale = generators.fp8_weights(rng, out_features, 768)
    x = bf16(rng, 37, 768)
    found = run_network(lambda net, x: {"y": project(net, x, weight, scale, **options)}, {"x": x})
    wide = ops.project(x, weight, scale).astype(np.float64)
    size = np.maximum(np.abs(wide), np.sqrt(np.mean(wide**2)))
    error = np.abs(found["y"].astype(np.float64) - wide)
    assert (error / (size * 2.0**-7)).max() <= limit


@on_gpu
@pytest.mark.parametrize("out_features", [80, 1600])
def test_project(rng, out_features):
    check_project(rng, out_features, 1.01, network.project)


@on_gpu
@pytest.mark.unsanitized
@pytest.mark.parametrize("out_features", [80, 1600])
def test_project_by_tensorrt(rng, out_features):
    """A product of BF16 weights is as near as ours."""

    check_project(rng, out_features, 1.01, network.project_bf16)


@on_gpu
@pytest.mark.unsanitized
@pytest.mark.parametrize("out_features", [80, 1600])
def test_project_in_fp8(rng, out_features):
    """Two roundings more: only near."""

    skip_without_fp8()
    check_project(rng, out_features, 64.0, network.project_fp8, rows_amax=8.0)


@on_gpu
@pytest.mark.parametrize("name", ["gate", "gate_full"])
def test_gate_golden(name):
    arrays, config = generators.golden(name)
    hidden, kv, q_weight, k_weight = (
        arrays[key].view(BF16) for key in ("hidden", "kv", "q_weight", "k_weight")
    )

    def make(net, hidden, kv, token_mask):
        out = network.gate(net, hidden, kv, q_weight, k_weight, config["eps"], token_mask)
        return {"out": out}

    inputs = {"hidden": hidden, "kv": kv, "token_mask": arrays["token_mask"]}
    found = run_network(make, inputs)["out"].astype(np.float32)
    wanted = arrays["out"].view(BF16).astype(np.float32)
    _, exponent = np.frexp(np.abs(wanted))
    ulp = np.ldexp(1.0, exponent - 8)
    assert (np.abs(found - wanted) <= ulp).all()


@on_gpu
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("hc_mult", "hidden_size"), [(1, 80), (2, 641), (4, 640), (7, 32)])
def test_gate_sizes(rng, hc_mult, hidden_size, dtype, in_place):
    """Two gates in a row: in place, TensorRT may let the second overwrite what the first has made,
    or copy it first."""
    hidden = rng.standard_normal((5, hc_mult, hidden_size)).astype(np.dtype(dtype))
    kv = bf16(rng, 5, (hc_mult + 1) * hidden_size)
    weights = bf16(rng, hc_mult, hidden_size), bf16(rng, hc_mult, hidden_size)

    def make(net, hidden, kv):
        first = network.gate(net, hidden, kv, *weights, 1e-6)
        return {"out": network.gate(net, first, kv, *weights, 1e-6, in_place=in_place)}

    found = run_network(make, {"hidden": hidden, "kv": kv}, in_place=in_place)["out"]
    expected = ops.gate(ops.gate(hidden, kv, *weights, 1e-6), kv, *weights, 1e-6)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(
        found.astype(np.float64), expected.astype(np.float64), rtol=2.0**-6, atol=2.0**-6
    )


@on_gpu
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gate_over_its_input(rng, dtype, in_place):
    """One address for both, whether TensorRT would alias them or not: the same bits come out."""
    kv = bf16(rng, 300, 5 * 640)
    hidden = rng.standard_normal((300, 4, 640)).astype(numpy_dtype(dtype))
    weights = bf16(rng, 4, 640), bf16(rng, 4, 640)

    def make(net, hidden, kv):
        return {"out": network.gate(net, hidden, kv, *weights, 1e-6, in_place=in_place)}

    inputs = {"hidden": hidden, "kv": kv}
    engine = SmallEngine(make, inputs, in_place=in_place)
    apart = engine.run(inputs)["out"]
    assert (bits(apart) != bits(hidden)).any(axis=-1).all()
    tensors = on_torch(inputs)
    over = tensors["hidden"]
    found = engine.engine.execution().run(tensors, out={"out": over})["out"]
    assert found is over
    np.testing.assert_array_equal(host(over).ravel(), apart.reshape(-1).view(np.uint8))


@on_gpu
def test_gates_in_place_need_no_second_stream(rng):
    """A stream is kept between two gates, unless TensorRT aliases the input and output of one."""
    shape = (256, 4, 640)
    inputs = {"hidden": bf16(rng, *shape), "kv": bf16(rng, 256, 5 * 640)}
    weights = bf16(rng, 4, 640), bf16(rng, 4, 640)

    def scratch_bytes(in_place):
        def make(net, hidden, kv):
            first = network.gate(net, hidden, kv, *weights, 1e-6)
            return {"out": network.gate(net, first, kv, *weights, 1e-6, in_place=in_place)}

        engine = SmallEngine(make, inputs, in_place=in_place).engine.cuda_engine
        return engine.device_memory_size_v2

    stream_bytes = inputs["hidden"].nbytes
    assert scratch_bytes(in_place=True) < stream_bytes <= scratch_bytes(in_place=False)


@on_gpu
def test_wrong_type_is_told(rng):
    """Keys in FP32: the build fails, and says what was expected and found."""

    weights = bf16(rng, 2, 64), bf16(rng, 2, 64)
    inputs = {"hidden": bf16(rng, 3, 2, 64), "kv": np.zeros((3, 192), np.float32)}
    with pytest.raises(EngramError, match="kv: expected type BF16, found FP32"):
        run_network(
            lambda net, hidden, kv: {"out": network.gate(net, hidden, kv, *weights, 1e-6)}, inputs
        )


@on_gpu
def test_wrong_field_is_told(rng):
    """By the creator, before there is a plugin."""
    weights = bf16(rng, 2, 64), bf16(rng, 2, 64)
    inputs = {"hidden": bf16(rng, 3, 2, 64), "kv": bf16(rng, 3, 192)}
    with pytest.raises(EngramError, match=r"EngramGate\.createPlugin: field 'eps': expected"):
        run_network(
            lambda net, hidden, kv: {"out": network.gate(net, hidden, kv, *weights, -1.0)}, inputs
        )


@on_gpu
def test_wrong_size_is_told(rng):
    weights = bf16(rng, 2, 64), bf16(rng, 2, 64)
    inputs = {"hidden": bf16(rng, 3, 2, 64), "kv": bf16(rng, 3, 128)}
    with pytest.raises(EngramError, match=r"kv dimension 1.*expected 192, found 128"):
        run_network(
            lambda net, hidden, kv: {"out": network.gate(net, hidden, kv, *weights, 1e-6)}, inputs
        )
