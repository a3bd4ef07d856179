# SPDX-License-Identifier: Apache-2.0
"""gate: within one BF16 ulp of |h| + |g * value|, since cancellation can leave fewer good bits."""

import re

import generators
import ml_dtypes
import numpy as np
import pytest
import reference
from devices import Torch, capture, on_devices

from trtllm_engram.plugins.errors import InputError
from trtllm_engram.runtime import ops

EPS = 1e-6


def inputs_of(seed, num_tokens, hc_mult, hidden_size):
    rng = np.random.default_rng(seed)
    return (
        generators.bf16(rng, num_tokens, hc_mult, hidden_size),
        generators.bf16(rng, num_tokens, (hc_mult + 1) * hidden_size),
        generators.bf16(rng, hc_mult, hidden_size),
        generators.bf16(rng, hc_mult, hidden_size),
    )


def assert_close(found, hidden, kv, q_weight, k_weight, eps=EPS, token_mask=None):
    exact, magnitude = reference.gate(
        reference.bf16_values(hidden), kv, q_weight, k_weight, eps, token_mask
    )
    error = np.abs(reference.bf16_values(found) - exact)
    assert (error <= reference.bf16_ulp(magnitude)).all()


def run(device, arrays, eps=EPS, token_mask=None, **options):
    mask = None if token_mask is None else device.put(token_mask)
    return device.get(ops.gate(*map(device.put, arrays), eps, mask, **options))


@on_devices
@pytest.mark.parametrize("name", ["gate", "gate_full"])
def test_golden(device, name):
    """At most one ulp of the output itself on these vectors."""
    arrays, parameters = generators.golden(name)
    inputs = [arrays[key] for key in ("hidden", "kv", "q_weight", "k_weight")]
    found = run(device, inputs, parameters["eps"], arrays["token_mask"])
    expected = reference.bf16_values(arrays["out"])
    error = np.abs(reference.bf16_values(found) - expected)
    assert (error <= reference.bf16_ulp(expected)).all()


@on_devices
@pytest.mark.parametrize("num_tokens", [1, 2, 31, 130], ids="T{}".format)
@pytest.mark.parametrize("hc_mult", [1, 4], ids="M{}".format)
@pytest.mark.parametrize("hidden_size", [8, 64, 640, 1096], ids="H{}".format)
def test_sizes(device, num_tokens, hc_mult, hidden_size):
    arrays = inputs_of(num_tokens, num_tokens, hc_mult, hidden_size)
    assert_close(run(device, arrays), *arrays)


@on_devices
@pytest.mark.parametrize("hidden_size", [1, 7, 1009], ids="H{}".format)
def test_odd_sizes(device, hidden_size):
    arrays = inputs_of(1, 5, 3, hidden_size)
    assert_close(run(device, arrays), *arrays)


@on_devices
def test_true_size(device):
    arrays = inputs_of(2, 6, 4, 5120)
    assert_close(run(device, arrays), *arrays)


@on_devices
@pytest.mark.parametrize("dtype", [np.bool_, np.uint8], ids=["bool", "uint8"])
def test_masked_tokens_stay(device, dtype):
    arrays = inputs_of(3, 7, 4, 64)
    mask = np.array([1, 0, 1, 1, 0, 0, 1]).astype(dtype)
    found = run(device, arrays, token_mask=mask)
    np.testing.assert_array_equal(found[mask == 0], arrays[0][mask == 0])
    assert_close(found, *arrays, token_mask=mask.astype(bool))


@on_devices
def test_no_evidence(device):
    """A dot product of zero has the sign + and the floor 1e-6 under its root."""
    _, _, q_weight, k_weight = inputs_of(4, 1, 2, 64)
    hidden = np.zeros((1, 2, 64), np.float32)  # BF16 would not tell the signs apart
    kv = np.full((1, 3 * 64), 0x3F80, np.uint16)
    found = run(device, (hidden, kv, q_weight, k_weight))
    expected = 1 / (1 + np.exp(-np.sqrt(1e-6)))
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # some roundings of FP32


@on_devices
@pytest.mark.parametrize("sign", [1, -1], ids=["agree", "oppose"])
def test_sign(device, sign):
    """Keys that agree with the residual open the gate, opposite ones close it."""
    ones = np.full((1, 2, 64), 0x3F80, np.uint16)
    weight = np.full((2, 64), 0x4040, np.uint16)
    keys = reference.bf16_bits(np.full((1, 128), float(sign)))
    kv = np.concatenate([keys, np.full((1, 64), 0x3F80, np.uint16)], axis=1)
    found = run(device, (ones, kv, weight, weight))
    assert_close(found, ones, kv, weight, weight)
    assert (reference.bf16_values(found) > 1.9).all() == (sign > 0)


@on_devices
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5], ids="eps{}".format)
def test_eps(device, eps):
    arrays = inputs_of(5, 4, 2, 64)
    assert_close(run(device, arrays, eps), *arrays, eps=eps)


@on_devices
@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["float16", "float32"])
def test_wider_residual(device, dtype):
    """The gate is a square root of a difference of FP32 sums: it has about 2**-10 of accuracy."""
    hidden, *others = inputs_of(6, 9, 4, 640)
    wide = reference.bf16_values(hidden).astype(dtype)
    found = run(device, (wide, *others))
    assert found.dtype == dtype
    exact, magnitude = reference.gate(wide.astype(np.float64), *others, EPS)
    assert (np.abs(found - exact) <= 2.0**-9 * magnitude).all()


@on_devices
def test_in_place(device):
    arrays = inputs_of(7, 9, 4, 64)
    hidden, *others = map(device.put, arrays)
    expected = device.get(ops.gate(hidden, *others, EPS))
    hidden_too = device.put(arrays[0].copy())
    result = ops.gate(hidden_too, *others, EPS, out=hidden_too)
    assert result is hidden_too
    np.testing.assert_array_equal(device.get(hidden_too), expected)


@on_devices
def test_no_tokens(device):
    assert run(device, inputs_of(8, 0, 4, 64)).shape == (0, 4, 64)


def test_bits_in_bf16_out():
    arrays = inputs_of(9, 3, 2, 64)
    assert ops.gate(*arrays, EPS).dtype == ml_dtypes.bfloat16


HIDDEN, KV, Q_WEIGHT, K_WEIGHT = inputs_of(10, 3, 2, 64)
REFUSED = {
    "hidden_axes": (
        (HIDDEN[0], KV, Q_WEIGHT, K_WEIGHT),
        "hidden: expected bfloat16 or uint16 or float16 or float32 [any, any, any], "
        "found uint16 [2, 64]",
    ),
    "kv_width": (
        (HIDDEN, KV[:, :128].copy(), Q_WEIGHT, K_WEIGHT),
        "kv: expected bfloat16 or uint16 [3, 192], found uint16 [3, 128]",
    ),
    "k_weight": (
        (HIDDEN, KV, Q_WEIGHT, K_WEIGHT[:1]),
        "k_weight: expected bfloat16 or uint16 [2, 64], found uint16 [1, 64]",
    ),
    "q_dtype": (
        (HIDDEN, KV, Q_WEIGHT.astype(np.float32), K_WEIGHT),
        "q_weight: expected bfloat16 or uint16 [2, 64], found float32 [2, 64]",
    ),
    "hidden_strided": (
        (HIDDEN.transpose(0, 2, 1).copy().transpose(0, 2, 1), KV, Q_WEIGHT, K_WEIGHT),
        "hidden: expected a contiguous array, "
        "found shape [3, 2, 64] with strides of [256, 2, 4] bytes",
    ),
}


@pytest.mark.parametrize(("arrays", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(arrays, text):
    with pytest.raises(InputError, match=f"^gate: {re.escape(text)}$"):
        ops.gate(*arrays, EPS)


def test_refused_eps():
    with pytest.raises(InputError, match="gate: eps: expected 0 to 1, got -1"):
        ops.gate(HIDDEN, KV, Q_WEIGHT, K_WEIGHT, -1.0)
    with pytest.raises(InputError, match="gate: eps: expected a number, found 'x'"):
        ops.gate(HIDDEN, KV, Q_WEIGHT, K_WEIGHT, "x")


def test_refused_mask():
    with pytest.raises(InputError, match=r"token_mask: expected bool or uint8 \[3\], found int64"):
        ops.gate(HIDDEN, KV, Q_WEIGHT, K_WEIGHT, EPS, np.ones(3, np.int64))


@pytest.mark.gpu
def test_graph_replay():
    device = Torch()
    first, second = inputs_of(11, 5, 4, 640), inputs_of(12, 5, 4, 640)
    inputs = [device.put(array) for array in first]
    out = device.put(np.zeros_like(first[0]))
    graph = capture(lambda: ops.gate(*inputs, EPS, out=out))
    for tensor, array in zip(inputs, second, strict=True):
        tensor.copy_(device.put(array))
    graph.replay()
    assert_close(device.get(out), *second)
