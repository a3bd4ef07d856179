# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's Python surfaces that a model touches, in the forms that its versions share.

Kept to: keyword arguments only, unknown ones passed on; settings read as attributes, with a default
where a version has none; profiles copied from input_ids; no KVCacheType, BuildConfig or
PluginConfig made or compared (they are other types in other versions).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import tensorrt as trt
from tensorrt_llm._common import default_net, default_trtnet
from tensorrt_llm.functional import Tensor, _create_tensor, allgather
from tensorrt_llm.models import MODEL_MAP

from trtllm_engram.builder.network import ITensor, Network
from trtllm_engram.plugins.errors import InputError

# Settings under which a layer is handed more than the residual stream, and how they say so.
_FUSIONS = ("reduce_fusion", "norm_quant_fusion", "pp_reduce_scatter")


def add_architecture(model_class: Any) -> None:
    """Lets a config.json name the class: TensorRT-LLM looks it up before it reads anything else."""
    MODEL_MAP[model_class.__name__] = model_class


def base_class(architecture: str) -> Any:
    """TensorRT-LLM's class of an architecture, or None where it knows none."""
    return MODEL_MAP.get(architecture)


def network() -> Network:
    """The network that is being built, TensorRT's own."""
    return default_trtnet()


def plugin_setting(name: str, default: Any = None) -> Any:
    """A setting of trtllm-build's plugin config."""
    return getattr(default_net().plugin_config, name, default)


def refuse_fusions() -> None:
    for name in _FUSIONS:
        if plugin_setting(name, False):
            raise InputError(
                f"--{name}: expected disable, found enable: a layer with Engram needs the residual "
                "stream alone, before it is normalised or scattered"
            )


def request_input(name: str, like: Tensor, extra: int, sizes: Sequence[int] = ()) -> Tensor:
    """An INT32 input [requests + extra, *sizes] with the profiles of input_ids, whose first
    dimension bounds the number of requests."""
    dims: OrderedDict[str, list[Any]] = OrderedDict()
    dims[f"{name}_requests"] = [
        [size + extra for size in (profile.min[0], profile.opt[0], profile.max[0])]
        for profile in like.profiles
    ]
    for axis, size in enumerate(sizes):
        dims[f"{name}_{axis}"] = [size] * len(like.profiles)
    return Tensor(name=name, dtype=trt.int32, shape=[-1, *sizes], dim_range=dims)


def wrapped(tensor: ITensor, layer: Any) -> Tensor:
    """A layer's output, for TensorRT-LLM's functions; the layer gets a name of their kind."""
    return _create_tensor(tensor, layer)


def gather_columns(tensor: ITensor, group: Sequence[int]) -> ITensor:
    """[T, columns of all ranks of a group, by ascending rank] of each rank's [T, columns]."""
    same = network().add_identity(tensor)
    gathered = allgather(wrapped(same.get_output(0), same), list(group), gather_dim=1)
    return gathered.trt_tensor
