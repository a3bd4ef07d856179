# SPDX-License-Identifier: Apache-2.0
"""An Engram layer in a TensorRT network of your own: built, run, captured. Needs a GPU."""

import tempfile
from pathlib import Path

import numpy as np

from trtllm_engram.builder import network
from trtllm_engram.builder.engine import EngineBuilder
from trtllm_engram.builder.layers import table_name
from trtllm_engram.builder.prepare import prepare
from trtllm_engram.builder.synthesize import synthesize
from trtllm_engram.runtime import Tables, open_store
from trtllm_engram.runtime.demo_engine import why_no_tensorrt
from trtllm_engram.runtime.device_array import DeviceArray
from trtllm_engram.runtime.devices import why_no_gpu
from trtllm_engram.runtime.engine import Engine
from trtllm_engram.runtime.hidden import SeededHidden

LAYER, MAX_TOKENS = 1, 64
if why := why_no_gpu() or why_no_tensorrt():
    raise SystemExit(f"expected a GPU and TensorRT: {why}")
with tempfile.TemporaryDirectory() as folder:
    # A small model in V4.1's layout; `prepare` would be given your checkpoint.
    synthesize(Path(folder, "checkpoint"), engram_vocab_size=1000, hidden_size=1024)
    prepare(Path(folder, "checkpoint"), Path(folder, "store"))
    store = open_store(Path(folder, "store"))
    config = store.config

    # The network: token ids and the residual stream in, the stream out. Tables stay outside.
    builder = EngineBuilder()
    net, gpu = builder.network, builder.capability
    residual = (config.hc_mult, config.hidden_size)
    token_ids = network.add_input(net, "token_ids", "int32", ("tokens",))
    positions = network.add_input(net, "positions", "int64", ("tokens",))
    boundaries = network.add_input(net, "cu_seqlens", "int32", ("boundaries",))
    hidden = network.add_input(net, "hidden", "bfloat16", ("tokens", *residual))
    ids = network.hash_ids(net, store.layout, store.token_map, token_ids, positions, boundaries).ids
    table = {"table": table_name(LAYER), "fingerprint": store.manifest.fingerprint}
    place = {"layer": LAYER, "layer_idx": config.layer_ids.index(LAYER)}
    sizes = {"head_dim": config.head_dim, "eps": config.rms_norm_eps, "capability": gpu}
    out = network.engram_layer(net, ids, hidden, store.weights(LAYER), **table, **place, **sizes)
    network.mark_output(net, "out", out)

    inputs = {
        "token_ids": np.arange(1000, 1000 + MAX_TOKENS, dtype=np.int32),
        "positions": np.arange(MAX_TOKENS, dtype=np.int64),
        "cu_seqlens": np.array([0, MAX_TOKENS], np.int32),
        "hidden": SeededHidden(config)(LAYER, 0, MAX_TOKENS),
    }
    most = {name: array.shape for name, array in inputs.items()}
    builder.add_profile({name: (1, *shape[1:]) for name, shape in most.items()}, most, most)
    plan = builder.serialize()
    with Tables.of_store(store):
        execution = Engine(plan).execution()
        print("out", execution.run(inputs)["out"].astype(np.float32).std())
        graph = execution.capture({name: DeviceArray.from_host(a) for name, a in inputs.items()})
        print("out", graph.replay()["out"].copy_to_host().astype(np.float32).std())
