# SPDX-License-Identifier: Apache-2.0
"""Where a test runs: the same body on numpy arrays, torch tensors on a GPU and DeviceArrays.

Tests hold BF16 as uint16 bits; `put` gives an array that ops take, `get` gives bits back.
"""

import ml_dtypes
import numpy as np
import pytest


class Numpy:
    def put(self, array):
        return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array

    def get(self, result):
        assert isinstance(result, np.ndarray)
        return result.view(np.uint16) if result.dtype == ml_dtypes.bfloat16 else result


class Torch:
    def __init__(self, where="cuda"):
        self.where = where

    def put(self, array):
        import torch

        if array.dtype == np.uint16:
            return torch.tensor(array.view(np.int16), device=self.where).view(torch.bfloat16)
        return torch.tensor(array, device=self.where)

    def get(self, result):
        import torch

        assert result.device.type == self.where
        if result.dtype == torch.bfloat16:
            return result.view(torch.int16).cpu().numpy().view(np.uint16)
        return result.cpu().numpy()


class DeviceArrays:
    def put(self, array):
        from trtllm_engram.runtime.device_array import DeviceArray

        return DeviceArray.from_host(Numpy().put(array))

    def get(self, result):
        return Numpy().get(result.copy_to_host())


CPU = pytest.param(Numpy(), id="cpu")
CUDA = pytest.param(Torch(), id="cuda", marks=pytest.mark.gpu)
CUDA_ARRAY = pytest.param(DeviceArrays(), id="cuda_array", marks=pytest.mark.gpu)

on_devices = pytest.mark.parametrize("device", [CPU, CUDA, CUDA_ARRAY])
on_sliceable_devices = pytest.mark.parametrize("device", [CPU, CUDA])


def capture(function):
    """A CUDA graph of what a function enqueues with torch tensors, after one call to warm up."""
    import torch

    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph
