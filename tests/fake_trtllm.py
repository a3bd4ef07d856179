# SPDX-License-Identifier: Apache-2.0
"""What a model file touches of TensorRT-LLM, in the forms of three versions, over fake_tensorrt.

Two families of decoders, whose layers add tanh(hidden @ weight) to the residual stream, with
attention.dense for the weight. Functions take no argument that the version does not have.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

NUMPY = {"int32": ("INT32", np.int32), "bfloat16": ("BF16", ml_dtypes.bfloat16)}


class State:
    """The network that is being built, and the model that it is of."""

    net: Any = None
    model: Any = None


def default_net() -> Any:
    return State.net


def default_trtnet() -> Any:
    return State.net.trt_network


class Tensor:
    def __init__(
        self, name: Any = None, dtype: Any = None, shape: Any = None, dim_range: Any = None
    ) -> None:
        assert isinstance(dim_range, OrderedDict)
        counts = {len(ranges) for ranges in dim_range.values()}
        assert len(counts) == 1
        assert len(dim_range) == len(shape)
        known = State.net.dims
        for dim, ranges in dim_range.items():
            assert known.setdefault(dim, ranges) == ranges, f"{dim}: two ranges"
        pairs = [
            [r if isinstance(r, list) else [r] * 3 for r in profile]
            for profile in zip(*dim_range.values(), strict=True)
        ]
        self.profiles = [
            SimpleNamespace(
                min=[r[0] for r in dims], opt=[r[1] for r in dims], max=[r[2] for r in dims]
            )
            for dims in pairs
        ]
        self.trt_tensor = default_trtnet().add_input(name, dtype, shape)

    @classmethod
    def of(cls, trt_tensor: Any) -> Tensor:
        made = cls.__new__(cls)
        made.trt_tensor, made.profiles = trt_tensor, []
        return made

    def __iadd__(self, other: Any) -> Any:
        raise AssertionError("a model must not write into a tensor")


def _create_tensor(trt_tensor: Any, producer: Any) -> Tensor:
    assert trt_tensor in producer.outputs
    producer.name = f"trtllm/{len(default_trtnet().layers)}"
    return Tensor.of(trt_tensor)


def allgather(tensor: Tensor, group: list[int], gather_dim: int = 0) -> Tensor:
    one, net = tensor.trt_tensor, default_trtnet()
    shape = list(one.shape)
    shape[gather_dim] *= len(group)

    def run(part: np.ndarray) -> np.ndarray:
        parts = net.gather(part)
        assert len(parts) == len(group)
        return np.concatenate(parts, gather_dim)

    return op(run, tensor, shape=tuple(shape))


class Module:
    def __init__(self) -> None:
        self._modules: dict[str, Any] = {}
        self._parameters: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        for place in ("_parameters", "_modules"):
            if name in self.__dict__.get(place, {}):
                return self.__dict__[place][name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Parameter | Module):
            self.__dict__.pop(name, None)
            self.__dict__["_parameters" if isinstance(value, Parameter) else "_modules"][name] = (
                value
            )
        else:
            object.__setattr__(self, name, value)

    def named_parameters(self, prefix: str = "") -> Any:
        for name, parameter in self._parameters.items():
            yield prefix + name, parameter
        for name, module in self._modules.items():
            yield from module.named_parameters(f"{prefix}{name}.")


class Parameter:
    def __init__(self, value: Any = None, shape: Any = None, dtype: Any = None) -> None:
        self.shape, (self.kind, self.dtype) = tuple(shape), NUMPY[dtype]
        self._array: Any = value
        self._constant: Any = None

    def is_inited(self) -> bool:
        return self._array is not None

    @property
    def raw_value(self) -> Any:
        assert self._constant is None, "raw_value after value"
        return self._array

    @property
    def value(self) -> Tensor:
        if self._constant is None:
            weights = SimpleNamespace(dtype=self.kind, array=lambda: self._array)
            layer = default_trtnet().add_constant(self.shape, weights)
            self._constant = _create_tensor(layer.get_output(0), layer)
        return self._constant

    @value.setter
    def value(self, array: Any) -> None:
        assert (array.shape, array.dtype) == (self.shape, self.dtype)
        self._array = array


class Mapping:
    def __init__(self, *, rank=0, tp_size=1, pp_size=1, cp_size=1, world_size=None, **extra):
        self.rank, self.tp_size, self.pp_size, self.cp_size = rank, tp_size, pp_size, cp_size
        for name, value in extra.items():
            setattr(self, name, value)

    tp_group = property(lambda self: [self.pp_rank * self.tp_size + r for r in range(self.tp_size)])
    pp_rank = property(lambda self: self.rank // self.tp_size)

    def is_first_pp_rank(self) -> bool:
        return self.pp_rank == 0

    def pp_layers(self, num_layers: int) -> list[int]:
        share = num_layers // self.pp_size
        return list(range(self.pp_rank * share, (self.pp_rank + 1) * share))


class PretrainedConfig:
    def __init__(
        self, *, architecture, dtype, hidden_size, num_hidden_layers, vocab_size, mapping=None, **kw
    ) -> None:
        self.architecture, self.dtype, self.hidden_size = architecture, dtype, hidden_size
        self.num_hidden_layers, self.vocab_size = num_hidden_layers, vocab_size
        self.mapping = Mapping(**(mapping or {}))
        self.kv_dtype = dtype
        self.head_size = hidden_size // 4
        self.num_key_value_heads = 4
        defaults = kw.pop("runtime_defaults", None)  # of config.json; an object afterwards
        self.runtime_defaults = None if defaults is None else SimpleNamespace(**defaults)
        for name, value in kw.items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "mapping": vars(self.mapping)}


class Weight(Module):
    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        super().__init__()
        self.weight = Parameter(shape=shape, dtype=dtype)


class DecoderLayer(Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        width = config.hidden_size * getattr(config, "hc_mult", 1)
        self.attention = Module()
        self.attention.local_layer_idx = index
        self.attention.dense = Weight((width, width), config.dtype)

    def forward(self, hidden_states: Any, use_cache: bool = False) -> Any:
        out = op(step, hidden_states, self.attention.dense.weight.value)
        return (out, None) if use_cache else out


def step(hidden: Any, weight: Any) -> Any:
    added = np.tanh(hidden.astype(np.float32) @ weight.astype(np.float32))
    return (hidden.astype(np.float32) + added).astype(hidden.dtype)


def op(function: Any, first: Tensor, *rest: Tensor, shape: Any = None, dtype: Any = None) -> Tensor:
    one = first.trt_tensor
    layer = default_trtnet().add(
        lambda *values: (function(*values),),
        [one, *(tensor.trt_tensor for tensor in rest)],
        (dtype or one.dtype, shape or one.shape),
    )
    return _create_tensor(layer.get_output(0), layer)


class LayerList(Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        here = config.mapping.pp_layers(config.num_hidden_layers)
        for index in range(len(here)):
            setattr(self, str(index), DecoderLayer(config, index))

    def __getitem__(self, index: int) -> Any:
        return self._modules[str(index)]

    def __iter__(self) -> Any:
        return iter(self._modules.values())

    def __len__(self) -> int:
        return len(self._modules)

    def forward(self, hidden_states: Any, use_cache: bool = False) -> Any:
        for layer in self._modules.values():
            hidden_states = layer(hidden_states, use_cache=use_cache)
            if use_cache:
                hidden_states = hidden_states[0]
        return hidden_states


class Transformer(Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.first = config.mapping.is_first_pp_rank()
        if self.first:
            shape = (config.vocab_size, config.hidden_size * getattr(config, "hc_mult", 1))
            self.vocab_embedding = Weight(shape, config.dtype)
        self.layers = LayerList(config)

    def forward(
        self, input_ids: Any, position_ids: Any, use_cache: bool, hidden_states: Any = None
    ):
        if self.first:
            embedding = self.vocab_embedding.weight.value
            shape = (*input_ids.trt_tensor.shape, embedding.trt_tensor.shape[1])
            look_up = lambda ids, table: table[ids]  # noqa: E731
            hidden_states = op(look_up, input_ids, embedding, shape=shape, dtype="BF16")
        return self.layers.forward(hidden_states, use_cache=use_cache)


# Dynamic sizes by name, others fixed, of the inputs of a paged cache and of its batch.
CACHE: dict[str, tuple[str, list[Any]]] = {
    "host_kv_cache_pool_pointers": ("INT64", ["pools", 2]),
    "kv_cache_block_offsets": ("INT32", ["pools", "batch_beams", 2, "blocks"]),
    "cache_indirection": ("INT32", ["prompts", "beams", "positions"]),
}
BATCH = ("sequence_length", "context_lengths", "host_request_types", "host_context_lengths")


def _cache_inputs(num_layers: int, mapping_shape: list[int]) -> dict[str, Any]:
    def made(name: str, dtype: str, sizes: list[Any]) -> Tensor:
        dims = OrderedDict(
            (size, [[1, 4, 64]] * 2) if isinstance(size, str) else (f"{name}_{axis}", [size] * 2)
            for axis, size in enumerate(sizes)
        )
        return Tensor(name, dtype, [-1 if isinstance(s, str) else s for s in sizes], dims)

    cache = {name: made(name, *shape) for name, shape in CACHE.items()}
    name = "host_kv_cache_pool_mapping"
    cache[name] = made(name, "INT32", mapping_shape)
    batch = {name: made(name, "INT32", ["batch_beams"]) for name in BATCH}
    return {
        "kv_cache_params": SimpleNamespace(**cache),
        "attention_params": SimpleNamespace(**batch),
    }


class PostInit(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.__post_init__()
        return made


class DecoderModelForCausalLM(Module, metaclass=PostInit):
    def __init__(self, config: Any, transformer: Any, lm_head: Any) -> None:
        super().__init__()
        self.config, self.transformer = config, transformer

    def __post_init__(self) -> None:
        self.quantised = True

    @classmethod
    def from_checkpoint(cls, ckpt_dir: str, config: Any) -> Any:
        weights = load_file(Path(ckpt_dir) / f"rank{config.mapping.rank}.safetensors")
        model = cls(config)
        own = dict(model.named_parameters())
        assert own.keys() <= weights.keys(), own.keys() - weights.keys()
        for name, parameter in own.items():
            parameter.value = weights[name]
        return model

    def forward(
        self, input_ids, position_ids=None, use_cache=False, hidden_states=None,
        kv_cache_params=None, attention_params=None,
    ) -> Any:  # fmt: skip
        extra = {} if hidden_states is None else {"hidden_states": hidden_states}
        hidden = self.transformer.forward(
            input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **extra
        )
        hidden.trt_tensor.name = "hidden"
        default_trtnet().mark_output(hidden.trt_tensor)

    def _inputs(self, max_num_tokens: int, use_cache: bool, num_layers: Any) -> dict[str, Any]:
        tokens = [[1, 4, 8], [1, max_num_tokens, max_num_tokens]]
        packed = default_net().plugin_config.remove_input_padding
        if not self.config.mapping.is_first_pp_rank():
            size = self.config.hidden_size
            dims = OrderedDict(num_tokens=tokens, hidden_size=[size] * 2)
            hidden = Tensor("hidden_states_input", "BF16", [-1, size], dims)
            return {"input_ids": None, "hidden_states": hidden, "use_cache": use_cache}
        dims = OrderedDict(num_tokens=tokens)
        if not packed:
            dims = OrderedDict(batch=[[1, 1, 4]] * 2, input_len=tokens)
        ids, positions = (
            Tensor(name, "INT32", [-1] * len(dims), dims) for name in ("input_ids", "position_ids")
        )
        inputs = {"input_ids": ids, "position_ids": positions, "use_cache": use_cache}
        if not default_net().plugin_config.gpt_attention_plugin:
            return inputs
        layers = self.config.num_hidden_layers if num_layers is None else num_layers
        return {**inputs, **_cache_inputs(layers, self.mapping_shape(layers))}
