# SPDX-License-Identifier: Apache-2.0
"""project: exact where sums are exact in FP32, else within FP32's own error and one rounding."""

import re

import generators
import numpy as np
import pytest
import reference
from devices import Torch, capture, on_devices

from trtllm_engram.builder.weight_layout import lay_weight
from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime import ops

SIZES = {
    "square": (64, 64),
    "ragged_out": (256, 37),
    "one_out": (32, 1),
    "wide": (1536, 160),
    "odd_blocks": (96, 224),
}
TOKENS = [1, 7, 16, 65, 131]
every_size = pytest.mark.parametrize(
    ("in_features", "out_features"), SIZES.values(), ids=SIZES.keys()
)


def run(device, x, weight, scale, **options):
    return device.get(ops.project(*map(device.put, (x, weight, scale)), **options))


def whole_numbers(rng, num_tokens, in_features, out_features):
    """Small whole numbers times powers of two: every FP32 sum of products is exact in any order."""
    x = reference.bf16_bits(rng.integers(-8, 9, (num_tokens, in_features)))
    fp8_of = np.array([0x00, 0x38, 0x40, 0x44, 0x48], np.uint8)  # 0 to 4
    weight = rng.choice(fp8_of, (out_features, in_features)) | rng.choice(
        np.array([0, 0x80], np.uint8), (out_features, in_features)
    )
    blocks = (-(-out_features // 32), -(-in_features // 32))
    return x, weight, rng.integers(126, 131, blocks).astype(np.uint8)


def assert_close(found, x, weight, scale):
    """One rounding to BF16, after sums with an error of 2**-23 of the terms for each addition."""
    exact, terms = reference.project(x, weight, scale)
    sums_error = x.shape[1] * 2.0**-23 * terms
    rounding = reference.bf16_ulp(np.abs(exact) + sums_error) / 2
    error = np.abs(reference.bf16_values(found) - exact)
    assert (error <= sums_error + rounding).all()


@on_devices
@every_size
@pytest.mark.parametrize("num_tokens", TOKENS, ids="T{}".format)
def test_exact_sums(device, in_features, out_features, num_tokens):
    x, weight, scale = whole_numbers(
        np.random.default_rng(num_tokens), num_tokens, in_features, out_features
    )
    exact, _ = reference.project(x, weight, scale)
    np.testing.assert_array_equal(run(device, x, weight, scale), reference.bf16_bits(exact))


@on_devices
@every_size
def test_random(device, in_features, out_features):
    rng = np.random.default_rng(1)
    x = generators.bf16(rng, 19, in_features)
    weight, scale = generators.fp8_weights(rng, out_features, in_features)
    assert_close(run(device, x, weight, scale), x, weight, scale)


@on_devices
def test_true_row(device):
    """The true number of inputs, 24 rows of 256."""
    rng = np.random.default_rng(2)
    x = generators.bf16(rng, 5, 6144)
    weight, scale = generators.fp8_weights(rng, 320, 6144)
    assert_close(run(device, x, weight, scale), x, weight, scale)


@on_devices
def test_each_block_has_its_scale(device):
    """One weight of 1.0 in each 32x32 block, so that an output is that block's scale."""
    scale = (100 + np.arange(12, dtype=np.uint8)).reshape(3, 4)
    weight = np.zeros((96, 128), np.uint8)
    weight[31::32, 31::32] = 0x38
    x = np.zeros((4, 128), np.uint16)
    x[np.arange(4), 31 + 32 * np.arange(4)] = 0x3F80
    found = reference.bf16_values(run(device, x, weight, scale))
    np.testing.assert_array_equal(found[:, 31::32], reference.e8m0_values(scale).T)


@on_devices
@pytest.mark.parametrize("scale", [12, 127, 134, 135, 200, 254, 255])
def test_every_weight(device, scale):
    """All FP8 values, one for each output: to infinity and NaN, where sums have one term."""
    values = np.arange(256, dtype=np.uint8)
    weight = np.zeros((256, 96), np.uint8)
    weight[values, values % 96] = values
    scales = np.full((8, 3), scale, np.uint8)
    x = np.full((3, 96), 0x3F80, np.uint16)  # 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        exact = reference.weights(weight, scales).sum(axis=1)
    found = run(device, x, weight, scales)
    np.testing.assert_array_equal(found, np.tile(reference.bf16_bits(exact + 0.0), (3, 1)))


@on_devices
@pytest.mark.parametrize("part", ["x", "weight", "scale"])
def test_nan(device, part):
    """A NaN reaches all outputs that it belongs to, and no others."""
    x, weight, scale = whole_numbers(np.random.default_rng(3), 3, 64, 64)
    if part == "x":
        x[1, 5] = 0x7FC0
        concerned = np.s_[1, :]
    elif part == "weight":
        weight[7, 3] = 0x7F
        concerned = np.s_[:, 7]
    else:
        scale[1, 0] = 255
        concerned = np.s_[:, 32:]
    found = run(device, x, weight, scale)
    expected = np.zeros(found.shape, bool)
    expected[concerned] = True
    np.testing.assert_array_equal(found == reference.NAN_BITS, expected)


@on_devices
def test_no_tokens(device):
    _, weight, scale = whole_numbers(np.random.default_rng(4), 1, 64, 64)
    assert run(device, np.zeros((0, 64), np.uint16), weight, scale).shape == (0, 64)


@on_devices
def test_out(device):
    x, weight, scale = whole_numbers(np.random.default_rng(5), 3, 64, 64)
    out = device.put(np.zeros((3, 64), np.uint16))
    run(device, x, weight, scale, out=out)
    exact, _ = reference.project(x, weight, scale)
    np.testing.assert_array_equal(device.get(out), reference.bf16_bits(exact))


X, WEIGHT, SCALE = whole_numbers(np.random.default_rng(6), 3, 64, 96)
REFUSED = {
    "x_width": (
        (X[:, :32].copy(), WEIGHT, SCALE),
        "x: expected bfloat16 or uint16 [any, 64], found uint16 [3, 32]",
    ),
    "x_dtype": (
        (X.astype(np.float32), WEIGHT, SCALE),
        "x: expected bfloat16 or uint16 [any, 64], found float32 [3, 64]",
    ),
    "scale_shape": (
        (X, WEIGHT, SCALE[:2]),
        "scale: expected float8_e8m0fnu or uint8 [3, 2], found uint8 [2, 2]",
    ),
    "weight_strided": (
        (X, WEIGHT[:, ::-1], SCALE),
        "weight: expected a contiguous array, found shape [96, 64] with strides of [64, -1] bytes",
    ),
    "in_features": (
        (X[:, :40].copy(), WEIGHT[:, :40].copy(), SCALE),
        "in_features: expected a positive multiple of 32, got 40",
    ),
}


@pytest.mark.parametrize(("arrays", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(arrays, text):
    with pytest.raises(InputError, match=f"^project: {re.escape(text)}$"):
        ops.project(*arrays)


def test_kernel_refused():
    text = "project: kernel: expected one of auto, generic, sm90_16, .*, found 'fast'"
    with pytest.raises(InputError, match=text):
        ops.project(X, WEIGHT, SCALE, kernel="fast")


@on_devices
def test_batch_invariance(device):
    """A token's bits do not depend on how many are beside it, whichever kernels that takes."""
    rng = np.random.default_rng(8)
    x = generators.bf16(rng, 300, 1536)
    weight, scale = generators.fp8_weights(rng, 264, 1536)
    whole = run(device, x, weight, scale)
    for num_tokens in (1, 16, 17, 64, 65, 128, 129, 257):
        part = run(device, x[-num_tokens:].copy(), weight, scale)
        np.testing.assert_array_equal(part, whole[-num_tokens:])


SM90_WIDE = ["sm90_wide_192", "sm90_wide_256"]
SM90 = ["sm90_16", "sm90_32", "sm90_64", "sm90_128", "sm90_256", *SM90_WIDE]
SM90_SIZES = {"square": (64, 64), "one_group": (32, 8), "wide": (1536, 1000), "row": (6144, 400)}


def needs_sm90():
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def run_sm90_v1(x, weight, scale, kernel="auto"):
    laid = lay_weight(weight, "sm90_v1")
    return run(Torch(), x, laid, scale, kernel=kernel, weight_layout="sm90_v1")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", SM90)
@pytest.mark.parametrize("num_tokens", [1, 16, 37, 64, 131, 300], ids="T{}".format)
@pytest.mark.parametrize(
    ("in_features", "out_features"), SM90_SIZES.values(), ids=SM90_SIZES.keys()
)
def test_kernels_agree(kernel, num_tokens, in_features, out_features):
    """Every kernel at every number of tokens gives the bits of the generic one."""
    needs_sm90()
    rng = np.random.default_rng(num_tokens)
    x = generators.bf16(rng, num_tokens, in_features)
    weight, scale = generators.fp8_weights(rng, out_features, in_features)
    expected = run(Torch(), x, weight, scale, kernel="generic")
    assert_close(expected, x, weight, scale)
    np.testing.assert_array_equal(run(Torch(), x, weight, scale, kernel=kernel), expected)
    if out_features % 16 == 0:
        found = run_sm90_v1(x, weight, scale, kernel)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", SM90_WIDE)
@pytest.mark.parametrize("num_tokens", [1, 131, 300], ids="T{}".format)
@pytest.mark.parametrize("num_left", [256, 8])
def test_outputs_left_over(kernel, num_tokens, num_left):
    """Those past a round of 192 on each multiprocessor, by products of single warps."""
    import torch

    needs_sm90()
    round_outputs = 192 * torch.cuda.get_device_properties().multi_processor_count
    rng = np.random.default_rng(num_left)
    x = generators.bf16(rng, num_tokens, 1056)
    weight, scale = generators.fp8_weights(rng, round_outputs + num_left, 1056)
    expected = run(Torch(), x, weight, scale, kernel="generic")
    np.testing.assert_array_equal(run(Torch(), x, weight, scale, kernel=kernel), expected)
    if num_left % 16 == 0:
        np.testing.assert_array_equal(run_sm90_v1(x, weight, scale, kernel), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", SM90)
def test_kernels_agree_on_extremes(kernel):
    """Any bytes at all: NaN, infinite and subnormal weights and scales."""
    needs_sm90()
    rng = np.random.default_rng(9)
    x = generators.bf16(rng, 33, 768)
    weight = rng.integers(0, 256, (512, 768)).astype(np.uint8)
    weight[32:] &= 0xFB  # without NaN
    scale = rng.integers(0, 255, (16, 24)).astype(np.uint8)
    scale[::3], scale[1], scale[2, 0] = 128, 0, 255
    expected = run(Torch(), x, weight, scale, kernel="generic")
    np.testing.assert_array_equal(run(Torch(), x, weight, scale, kernel=kernel), expected)
    found = run_sm90_v1(x, weight[32:], scale[1:], kernel)
    np.testing.assert_array_equal(found, expected[:, 32:])


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", SM90)
def test_one_large_scale(kernel):
    """A scale too large for one product with a weight of sm90_v1, in the rows of one warp."""
    needs_sm90()
    rng = np.random.default_rng(12)
    x = generators.bf16(rng, 33, 768)
    weight, scale = generators.fp8_weights(rng, 512, 768)
    scale[3, 5] = 180
    expected = run(Torch(), x, weight, scale, kernel="generic")
    np.testing.assert_array_equal(run_sm90_v1(x, weight, scale, kernel), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", range(12, 256))  # below, weights round to -0, sums to 0
def test_every_weight_in_sm90_v1(scale):
    """All FP8 values but NaN times every scale, where sums have one term."""
    needs_sm90()
    values = np.arange(256, dtype=np.uint8)
    weight = np.zeros((256, 96), np.uint8)
    weight[values, values % 96] = values & np.where(values & 0x7F == 0x7F, 0xFE, 0xFF)
    scales = np.full((8, 3), scale, np.uint8)
    x = np.full((3, 96), 0x3F80, np.uint16)  # 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        exact = reference.weights(weight, scales).sum(axis=1)
    found = run_sm90_v1(x, weight, scales)
    np.testing.assert_array_equal(found, np.tile(reference.bf16_bits(exact + 0.0), (3, 1)))


@pytest.mark.gpu
def test_generic_does_not_take_sm90_v1():
    x, weight, scale = whole_numbers(np.random.default_rng(11), 3, 64, 32)
    with pytest.raises(InputError, match=r"^project: kernel: expected one of those of sm90"):
        run_sm90_v1(x, weight, scale, "generic")


@pytest.mark.gpu
def test_kernel_that_does_not_fit():
    """Outputs of an odd number are the generic kernel's."""
    x, weight, scale = whole_numbers(np.random.default_rng(10), 3, 64, 37)
    with pytest.raises(EngramError, match=r"^project: "):
        run(Torch(), x, weight, scale, kernel="sm90_16")


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 65], ids="T{}".format)
def test_graph_replay(num_tokens):
    device = Torch()
    rng = np.random.default_rng(7)
    x, weight, scale = whole_numbers(rng, num_tokens, 256, 96)
    other, _, _ = whole_numbers(rng, num_tokens, 256, 96)
    inputs = [device.put(array) for array in (x, weight, scale)]
    out = device.put(np.zeros((num_tokens, 96), np.uint16))
    graph = capture(lambda: ops.project(*inputs, out=out))
    inputs[0].copy_(device.put(other))
    graph.replay()
    exact, _ = reference.project(other, weight, scale)
    np.testing.assert_array_equal(device.get(out), reference.bf16_bits(exact))
