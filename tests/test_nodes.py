# SPDX-License-Identifier: Apache-2.0
"""builder.nodes: the plugins' inputs and fields, without TensorRT."""

import sys

import fake_tensorrt
import generators
import numpy as np
import pytest
from engines import V4_COLUMNS, bits, small_store

from trtllm_engram.builder import network, nodes
from trtllm_engram.builder.layers import EngramLayer
from trtllm_engram.plugins.errors import InputError
from trtllm_engram.plugins.registration import field_arrays, plugin_fields
from trtllm_engram.runtime import ops


@pytest.fixture
def rng():
    return np.random.default_rng(4)


def every_node(rng):
    weight, scale = generators.fp8_weights(rng, 96, 64)
    layout = generators.small_layout()
    names = {"table": "t", "fingerprint": "0" * 64, "layer": 1, "layer_idx": 0, "head_dim": 64}
    hashed = ("token_ids", "positions", "cu_seqlens", "lookback_ids", "lookback_dead", "dead_mask")
    return [
        nodes.hash_node(layout, generators.small_token_map(), *hashed, next_lookback=True),
        nodes.hash_node(layout, "token_map", "token_ids", "positions"),
        nodes.lookup_node("ids", **names),
        nodes.project_node("x", weight, scale),
        nodes.gate_node("hidden", "kv", "q", "k", 1e-6, "mask", in_place=True),
    ]


@pytest.mark.parametrize("index", range(5))
def test_fields_are_the_plugins(rng, index):
    """Every name and type is one that the library declares, and no required field is missing."""
    node = every_node(rng)[index]
    if not plugin_fields():
        pytest.skip("a CPU-only library has no plugins")
    assert field_arrays(node.op, dict(node.fields)).keys() == node.fields.keys()


def test_inputs_are_in_the_plugins_order(rng):
    whole, least = every_node(rng)[:2]
    constants = ["multipliers", "primes", "offsets"]
    past = ["lookback_ids", "lookback_dead", "dead_mask"]
    tokens = ["token_ids", "positions", "cu_seqlens", "token_map"]
    assert list(whole.inputs) == tokens + past + constants
    assert list(least.inputs) == ["token_ids", "positions", "token_map", *constants]
    assert least.fields["history"] == "whole_prompt"
    assert least.outputs == ("hash_ids",)


@pytest.mark.parametrize("missing", ["layer", "layer_idx", "head_dim"])
def test_what_says_which_rows_has_no_default(monkeypatch, missing):
    """The first layer's ids in another's table, for one, would be wrong rows and no error."""
    if not plugin_fields():
        pytest.skip("a CPU-only library has no plugins")
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.make())
    net = fake_tensorrt.Network()
    ids = net.add_input("ids", "INT32", (-1, 2, 24))
    names = {"table": "t", "fingerprint": "0" * 64, "layer": 14, "layer_idx": 1, "head_dim": 256}
    del names[missing]
    told = rf"^Engram\w+: {missing}: expected a value, found none"
    for add in (network.lookup, network.lookup_mxfp8, network.prefetch):
        with pytest.raises(InputError, match=told):
            add(net, ids, **names)


class Recorder:
    """In the place of a network or graph: keeps the nodes that are put in."""

    def __init__(self):
        self.nodes = []

    def add(self, node, _name=""):
        self.nodes.append(node)
        return tuple(f"{node.op}.{output}" for output in node.outputs)


@pytest.mark.parametrize("capability", [None, (8, 9), (9, 0)])
@pytest.mark.parametrize("in_place", [False, True])
def test_both_forms_of_a_layer(monkeypatch, tmp_path, capability, in_place):
    """engram_layer and EngramLayer put in the same nodes, for the same keywords."""
    store = small_store(tmp_path, **V4_COLUMNS, layers=(1, 14))
    one, other = Recorder(), Recorder()
    chosen = {"capability": capability, "in_place": in_place}
    out = EngramLayer(store, 14, **chosen)(one, "ids", "hidden").hidden
    monkeypatch.setattr(network, "add", Recorder.add)
    names = {"table": "engram_14", "fingerprint": store.manifest.fingerprint, "layer": 14}
    names |= {"layer_idx": 1, "head_dim": 256, "eps": store.config.rms_norm_eps}
    assert network.engram_layer(other, "ids", "hidden", store.weights(14), **names, **chosen) == out
    assert [node.op for node in one.nodes] == ["EngramLookup", "EngramProject", "EngramGate"]
    assert one.nodes[1].fields == {"weight_layout": expected_layout(capability)}
    assert one.nodes[2].fields["in_place"] == in_place
    for ours, theirs in zip(one.nodes, other.nodes, strict=True):
        assert (ours.op, ours.fields) == (theirs.op, theirs.fields)
        for name, value in ours.inputs.items():
            np.testing.assert_array_equal(value, theirs.inputs[name], err_msg=name)


def expected_layout(capability):
    return "sm90_v1" if capability == (9, 0) else "row_major"


def test_lookback_dead_needs_lookback_ids():
    with pytest.raises(InputError, match=r"^hash_ids: lookback_ids: expected with lookback_dead"):
        nodes.hash_node(generators.small_layout(), "map", "ids", "positions", lookback_dead="dead")


@pytest.mark.parametrize("out_features", [1, 33, 96])
def test_words_are_the_bytes(rng, out_features):
    """Also where the scales do not fill their last word."""
    weight, scale = generators.fp8_weights(rng, out_features, 96)
    node = nodes.project_node("x", weight, scale)
    assert node.inputs["weight"].shape == (out_features, 24)
    np.testing.assert_array_equal(node.inputs["weight"].view(np.uint8), weight)
    words = node.inputs["scale"].view(np.uint8)
    np.testing.assert_array_equal(words[: scale.size], scale.ravel())
    assert words.size == -(-scale.size // 4) * 4


def test_project_refuses_weights_that_do_not_fit(rng):
    weight, scale = generators.fp8_weights(rng, 64, 64)
    with pytest.raises(InputError, match=r"^project: scale: expected E8M0 bytes \[2, 2\], found"):
        nodes.project_node("x", weight, scale[:, :1])
    with pytest.raises(InputError, match=r"^project: weight: expected FP8 bytes \[out, in\]"):
        nodes.project_node("x", weight[:, :60], scale)


@pytest.mark.parametrize("out_features", [1, 31, 64, 100])
def test_dequantize(rng, out_features):
    """The same BF16 as a lookup makes of a row with one scale per 32 values."""
    weight, scale = generators.fp8_weights(rng, out_features, 96)
    row_scales = np.repeat(scale, 32, axis=0)[:out_features]
    ids = np.arange(out_features, dtype=np.int32)[:, None]
    expected = ops.lookup(weight, np.ascontiguousarray(row_scales), ids)
    np.testing.assert_array_equal(bits(nodes.dequantize(weight, scale)), bits(expected))
