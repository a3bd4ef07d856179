# SPDX-License-Identifier: Apache-2.0
"""The ONNX form: valid, complete, and the same nodes as the network's."""

import errno
import os
import sys

import ml_dtypes
import numpy as np
import pytest
from engines import small_store

from trtllm_engram.builder import nodes
from trtllm_engram.builder import onnx as engram_onnx
from trtllm_engram.builder.model import SCALE_ORDERS, ModelOptions, packed_names
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.plugins.registration import plugin_fields
from trtllm_engram.runtime.cli import main

onnx = pytest.importorskip("onnx", reason="the extra `onnx` is not installed")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("onnx"))


def export(store, path, **options):
    engram_onnx.export(store, path, **options)
    onnx.checker.check_model(str(path))  # by path: external data too
    return onnx.load(str(path))


def constants(model):
    """Initializers as numpy arrays; BF16 as bits."""
    arrays = {}
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        arrays[tensor.name] = array.view(np.uint16) if array.dtype.itemsize == 2 else array
    return arrays


def dims_of(value):
    return [one.dim_value or one.dim_param for one in value.type.tensor_type.shape.dim]


def test_flat_residual_streams(store, tmp_path):
    """The inputs have lost their shape, which a Reshape gives back; the outputs have it."""
    model = export(store, tmp_path / "m.onnx", options=ModelOptions(flat_hidden=True))
    sizes = {value.name: dims_of(value) for value in [*model.graph.input, *model.graph.output]}
    residual = [store.config.hc_mult, store.config.hidden_size]
    for layer in store.config.layer_ids:
        assert sizes[f"layers.{layer}.hidden"] == ["values"]
        assert sizes[f"layers.{layer}.hidden_out"] == ["tokens", *residual]
    shapes = constants(model)
    reshapes = [node for node in model.graph.node if node.op_type == "Reshape"]
    assert [shapes[node.input[1]].tolist() for node in reshapes] == [[-1, *residual]] * 2


def test_whole_model(store, tmp_path):
    model = export(store, tmp_path / "m.onnx", options=ModelOptions(check_outputs=True))
    assert [value.name for value in model.graph.input] == [
        "token_ids",
        "positions",
        "cu_seqlens",
        "lookback_ids",
        "layers.1.hidden",
        "layers.5.hidden",
    ]
    assert [value.name for value in model.graph.output] == [
        "hash_ids",
        "layers.1.rows",
        "layers.1.hidden_out",
        "layers.5.rows",
        "layers.5.hidden_out",
        "next_lookback_ids",
    ]
    ops = [node.op_type for node in model.graph.node]
    layer = ["EngramLookup", "EngramProject", "EngramGate"]
    assert ops == ["EngramHash", *layer, *layer]


@pytest.mark.parametrize("order", SCALE_ORDERS)
def test_packed_rows(store, tmp_path, order):
    """By a lookup of their own, of the same ids and table."""
    model = export(store, tmp_path / "m.onnx", options=ModelOptions(check_mxfp8=order))
    lookups = [node for node in model.graph.node if node.op_type == "EngramLookup"]
    packed = [node for node in lookups if len(node.output) == 2]
    assert [len(node.output) for node in lookups] == [1, 2] * 2
    dims = {value.name: dims_of(value) for value in model.graph.output}
    row_dim = store.config.row_dim
    for layer_id, node in zip(store.config.layer_ids, packed, strict=True):
        values, *scales = packed_names(layer_id)
        assert list(node.output) == [values, scales[SCALE_ORDERS.index(order)]]
        assert dims[values] == ["tokens", row_dim // 4]
        linear = ["tokens", row_dim // 128]
        assert dims[node.output[1]] == (linear if order == "linear" else ["scale_words"])
    assert [table_of(node) for node in packed] == [b"engram_1", b"engram_5"]


def test_packed_rows_whose_scales_fill_no_words(tmp_path):
    store = small_store(tmp_path, head_dim=32, n_heads=1)
    options = ModelOptions(check_mxfp8="linear")
    with pytest.raises(
        InputError, match=r"^check_mxfp8: expected columns .* found \d scales of a t"
    ):
        export(store, tmp_path / "m.onnx", options=options)
    export(store, tmp_path / "m.onnx", options=ModelOptions(check_mxfp8="128x4"))


def table_of(node):
    return next(one.s for one in node.attribute if one.name == "table")


def test_prefetch(store, tmp_path):
    """All prefetches come first; each lookup takes the ids and its own prefetch's rows."""
    options = ModelOptions(check_outputs=True, prefetch=True)
    node = export(store, tmp_path / "m.onnx", options=options).graph.node
    layer = ["EngramLookup", "EngramProject", "EngramGate"]
    prefetches = ["EngramPrefetch", "EngramPrefetch"]
    assert [one.op_type for one in node] == ["EngramHash", *prefetches, *layer, *layer]
    for prefetch, lookup, table in (
        (node[1], node[3], b"engram_1"),
        (node[2], node[6], b"engram_5"),
    ):
        assert list(lookup.input) == ["hash_ids", *prefetch.output]
        assert table_of(prefetch) == table_of(lookup) == table
    assert list(node[3].output) == ["layers.1.rows"]


def test_nodes_are_what_the_parser_makes_plugins_of(store, tmp_path):
    """Attributes are the creator's fields by name and type, plus the plugin's version."""
    model = export(store, tmp_path / "m.onnx")
    kinds = {"INT32": "INT", "FLOAT32": "FLOAT", "CHAR": "STRING"}
    for node in model.graph.node:
        assert node.domain == "trt.plugins"
        attributes = {attribute.name: attribute for attribute in node.attribute}
        assert attributes.pop("plugin_version").s == b"1"
        assert attributes.pop("plugin_namespace").s == b""
        for name, attribute in attributes.items():
            assert attribute.type == getattr(
                onnx.AttributeProto, kinds[plugin_fields()[node.op_type][name].type]
            )


def test_weights_are_the_stores(store, tmp_path):
    arrays = constants(export(store, tmp_path / "m.onnx"))
    weights = store.weights(5)
    np.testing.assert_array_equal(
        arrays["EngramProject_5.weight"].view(np.uint8), weights.wkv_weight
    )
    np.testing.assert_array_equal(arrays["EngramGate_6.k_weight"], weights.k_weight.view(np.uint16))
    np.testing.assert_array_equal(arrays["EngramHash_0.token_map"], store.token_map)


@pytest.mark.parametrize("external", [False, True])
def test_tensorrts_own_projection(store, tmp_path, external):
    """The product's weight is transposed, in BF16; with external data the model holds no weight."""
    path = tmp_path / "m.onnx"
    model = export(store, path, projection="tensorrt", external=external)
    weights = store.weights(1)
    expected = nodes.dequantize(weights.wkv_weight, weights.wkv_scale).T
    found = constants(model)["MatMul_2.weight"].view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found, expected)
    data = tmp_path / "m.onnx.data"
    assert data.exists() == external
    if external:
        assert path.stat().st_size < 20_000 < data.stat().st_size


def test_external_where_a_protobuf_is_too_small(store, tmp_path, monkeypatch):
    monkeypatch.setattr(engram_onnx, "_MOST_INLINE_BYTES", 10_000)
    export(store, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").exists()
    with pytest.raises(InputError, match=r"^external: expected True for \d+ bytes"):
        export(store, tmp_path / "inline.onnx", external=False)
    assert not (tmp_path / "inline.onnx").exists()


def test_a_model_that_fails_leaves_the_old_one_and_its_data(store, tmp_path, monkeypatch):
    """New weights beside an old model would be another model."""
    path = tmp_path / "m.onnx"
    export(store, path, external=True)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}

    def full_disk(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(engram_onnx.OnnxGraph, "_model", full_disk)
    with pytest.raises(InputError, match="disk full"):
        engram_onnx.export(store, path, projection="tensorrt", external=True)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_whole_prompts(store, tmp_path, dtype):
    options = ModelOptions(dtype, "whole_prompt")
    model = export(store, tmp_path / "m.onnx", options=options, tables={5: "other"})
    names = [value.name for value in [*model.graph.input, *model.graph.output]]
    assert not [name for name in names if "lookback" in name]
    kinds = {"bfloat16": "BFLOAT16", "float16": "FLOAT16", "float32": "FLOAT"}
    hidden = model.graph.input[-1].type.tensor_type
    assert hidden.elem_type == getattr(onnx.TensorProto, kinds[dtype])
    assert hidden.shape.dim[0].dim_param == "tokens"
    tables = [
        attribute.s
        for node in model.graph.node
        for attribute in node.attribute
        if attribute.name == "table"
    ]
    assert tables == [b"engram_1", b"other"]


def test_refusals(store, tmp_path):
    with pytest.raises(InputError, match=r"^tables: expected layers of 1, 5, found 2$"):
        engram_onnx.export(store, tmp_path / "m.onnx", tables={2: "x"})
    with pytest.raises(InputError, match=r"^projection: expected plugin or tensorrt in ONNX"):
        engram_onnx.export(store, tmp_path / "m.onnx", projection="fp8")
    assert not list(tmp_path.iterdir())


def test_without_onnx(store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(EngramError, match=r"pip install onnx$"):
        engram_onnx.export(store, tmp_path / "m.onnx")


def test_command(store, tmp_path, capsys):
    path = tmp_path / "m.onnx"
    assert main(["build", str(store.path), "--onnx", "--output", str(path)]) == 0
    onnx.checker.check_model(str(path))
    assert "table engram_5" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", [["--max-batch", "8"], ["--max-tokens", "9"], ["--version-compatible"]]
)
def test_options_of_engines_are_refused(store, tmp_path, capsys, option):
    command = ["build", str(store.path), "--onnx", "--output", str(tmp_path / "m.onnx"), *option]
    assert main(command) == 2
    assert f"{option[0]}: expected for an engine, found with --onnx" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
