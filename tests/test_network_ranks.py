# SPDX-License-Identifier: Apache-2.0
"""network.rank_ids: the ranks of sequence parallelism make, each of its tokens, the whole layer."""

import sys

import fake_tensorrt
import numpy as np
import pytest
from engines import TEXT, V4_COLUMNS, bits, on_gpu, run_network, small_store

from trtllm_engram.builder import network
from trtllm_engram.builder.dtypes import TENSORRT
from trtllm_engram.builder.model import hidden_name, hidden_out_name
from trtllm_engram.plugins.registration import plugin_fields, register
from trtllm_engram.runtime import Tables
from trtllm_engram.runtime.compare import Reference, make_feeds

RANKS = pytest.mark.parametrize(("num_tokens", "num_ranks"), [(37, 4), (8, 4), (1, 3), (5, 1)])


@on_gpu
@RANKS
def test_rank_slices(num_tokens, num_ranks):
    """Every rank hashes all tokens; its own part, the last one padded, is as if it were alone."""
    count = -(-num_tokens // num_ranks)
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 4099, (num_tokens, 1, 24)).astype(np.int32)
    hidden = np.zeros((count, 4, 160), np.float32)
    padded = np.concatenate([ids, np.full((count * num_ranks - num_tokens, 1, 24), -1, np.int32)])
    for rank in range(num_ranks):
        found = run_network(
            lambda net, ids, hidden, rank=rank: {"part": network.rank_ids(net, ids, hidden, rank)},
            {"ids": ids, "hidden": hidden},
            least={"ids": 1},
        )
        np.testing.assert_array_equal(found["part"], padded[rank * count :][:count])


def rank_layer(store, rank=None):
    """make(network, ids, hidden) of a layer: a rank's part of it, or the whole."""
    config = store.config
    names = {"table": "engram_1", "fingerprint": store.manifest.fingerprint, "layer": 1}
    sizes = {"layer_idx": 0, "head_dim": config.head_dim, "eps": config.rms_norm_eps}

    def make(net, ids, hidden):
        part = ids if rank is None else network.rank_ids(net, ids, hidden, rank)
        return {"out": network.engram_layer(net, part, hidden, store.weights(1), **names, **sizes)}

    return make


def ranks_of(store, run, num_tokens, num_ranks):
    """The layer's streams of the ranks one after another, and the reference's."""
    feed = make_feeds(store, [(num_tokens, 2)], text=TEXT)[0]
    reference, hidden = Reference(store)(feed), feed[hidden_name(1)]
    count = -(-num_tokens // num_ranks)
    padding = np.zeros((count * num_ranks - num_tokens, *hidden.shape[1:]), hidden.dtype)
    padded = np.concatenate([hidden, padding])
    parts = [
        run(
            rank_layer(store, rank),
            {"ids": reference["hash_ids"], "hidden": padded[rank * count :][:count]},
        )["out"]
        for rank in range(num_ranks)
    ]
    whole = np.concatenate(parts)
    np.testing.assert_array_equal(bits(whole[num_tokens:]), bits(padding))
    return whole[:num_tokens], reference, feed


@RANKS
def test_ranks_make_the_whole_layer(tmp_path, monkeypatch, num_tokens, num_ranks):
    """Lookup, projection and gate of every rank's tokens, in numpy: the same bits as at once."""
    if not plugin_fields():
        pytest.skip("a CPU-only library has no plugins")
    trt = fake_tensorrt.make()
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    register(trt)
    store = small_store(tmp_path, **V4_COLUMNS, layers=(1, 14))

    def run(make, inputs):
        net = fake_tensorrt.Network()
        net.tables = {"engram_1": (store, 1)}
        tensors = {
            name: net.add_input(name, TENSORRT[array.dtype.name], (-1, *array.shape[1:]))
            for name, array in inputs.items()
        }
        for name, tensor in make(net, **tensors).items():
            network.mark_output(net, name, tensor)
        return net.run(inputs)

    found, reference, _ = ranks_of(store, run, num_tokens, num_ranks)
    np.testing.assert_array_equal(bits(found), bits(reference[hidden_out_name(1)]))


@on_gpu
@RANKS
def test_engines_of_ranks_make_the_whole_layer(tmp_path, num_tokens, num_ranks):
    store = small_store(tmp_path, **V4_COLUMNS, layers=(1, 14))

    def run(make, inputs):
        return run_network(make, inputs, least=dict.fromkeys(inputs, 1))

    with Tables.of_store(store):
        found, reference, feed = ranks_of(store, run, num_tokens, num_ranks)
        inputs = {"ids": reference["hash_ids"], "hidden": feed[hidden_name(1)]}
        whole = run(rank_layer(store), inputs)["out"]
    np.testing.assert_array_equal(bits(found), bits(whole))
