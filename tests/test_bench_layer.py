# SPDX-License-Identifier: Apache-2.0
"""bench layer: what it holds results against, and what it asks; never how fast anything is."""

import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import reference

from trtllm_engram.builder.weight_layout import lay_weight
from trtllm_engram.runtime import ops
from trtllm_engram.runtime.bench import layer
from trtllm_engram.runtime.cli import main

TOKENS, COLUMNS, HEAD_DIM, HC_MULT, HIDDEN = 5, 3, 64, 2, 48
EPS = 1e-6


@pytest.fixture(name="case")
def small_case():
    rng = np.random.default_rng(0)
    weights = layer.random_weights(rng, HC_MULT, HIDDEN, COLUMNS * HEAD_DIM)
    values = rng.integers(0, 256, (TOKENS, COLUMNS, HEAD_DIM), np.uint8) & 0xBF
    scales = rng.integers(124, 128, (TOKENS, COLUMNS, HEAD_DIM // 32), np.uint8)
    hidden = rng.standard_normal((TOKENS, HC_MULT, HIDDEN)).astype(ml_dtypes.bfloat16)
    return values, scales, hidden, weights


def run(values, scales, hidden, weights):
    """The layer by the CPU's ops."""
    ids = np.arange(TOKENS * COLUMNS, dtype=np.int32).reshape(TOKENS, COLUMNS)
    rows = ops.lookup(values.reshape(-1, HEAD_DIM), scales.reshape(ids.size, -1), ids)
    kv = ops.project(rows, weights.wkv_weight, weights.wkv_scale)
    return ops.gate(hidden, kv, weights.q_weight, weights.k_weight, EPS)


def test_the_layer_is_right(case):
    assert layer.is_right(run(*case), layer.reference(*case))


@pytest.mark.parametrize("part", ["scale", "row", "weight", "hidden", "gate"])
def test_a_layer_of_other_inputs_is_not(case, part):
    values, scales, hidden, weights = case
    expected = layer.reference(*case)
    if part == "scale":
        scales[3, 1, 0] += 2
    elif part == "row":
        values[[0, 1]] = values[[1, 0]]
    elif part == "weight":
        weights = replace(weights, wkv_weight=np.roll(weights.wkv_weight, 1, axis=0))
    elif part == "hidden":
        hidden[2] *= np.array(1.0625, ml_dtypes.bfloat16)
    else:
        weights = replace(weights, k_weight=-weights.k_weight)
    assert not layer.is_right(run(values, scales, hidden, weights), expected)


def test_nan_is_not_right(case):
    out = run(*case)
    out[4, 1, 7] = np.nan
    assert not layer.is_right(out, layer.reference(*case))


def test_weights_fit_every_layout_and_make_outputs_of_about_1():
    weights = layer.random_weights(np.random.default_rng(1), 1, 160, 6144)
    lay_weight(weights.wkv_weight, "sm90_v1")  # which has no NaN
    x = np.random.default_rng(2).uniform(-1, 1, (4, 6144)).astype(ml_dtypes.bfloat16)
    exact, _ = reference.project(x.view(np.uint16), weights.wkv_weight, weights.wkv_scale)
    assert 0.25 < np.sqrt((exact**2).mean()) < 4


@pytest.mark.parametrize(
    ("num_tokens", "ratios"), [(1, [0.57]), (64, [0.57]), (256, []), (1024, []), (8192, [0.93])]
)
def test_targets(num_tokens, ratios):
    assert [(one.against, one.ratio) for one in layer.targets(num_tokens)] == [
        (layer.RIVAL, ratio) for ratio in ratios
    ]


def test_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    layer.load_torch.cache_clear()
    assert main(["bench", "layer", "--tokens", "1,64"]) == 2
    assert "bench: error: expected torch for a benchmark on a GPU" in capsys.readouterr().err
