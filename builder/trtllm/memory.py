# SPDX-License-Identifier: Apache-2.0
"""The Engram part of a decoder: one hash node, and for each of its layers lookup, projection and
gate. Tables are bound at run time; everything else is a parameter, from rank{N}.safetensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tensorrt_llm.module import Module
from tensorrt_llm.parameter import Parameter

from trtllm_engram.builder import network
from trtllm_engram.builder.config import SCALE_BLOCK
from trtllm_engram.builder.layout import EngramLayout
from trtllm_engram.builder.network import ITensor
from trtllm_engram.builder.trtllm import front_end, phantom
from trtllm_engram.builder.trtllm.section import EngramSection, layer_prefix
from trtllm_engram.plugins.errors import InputError

CU_SEQLENS = "engram_cu_seqlens"
LOOKBACK_IDS = "engram_lookback_ids"
NEXT_LOOKBACK_IDS = "engram_next_lookback_ids"

_WORD_BYTES = 4


class EngramMemory(Module):  # type: ignore[misc]
    """What a model owns once. Its name in the model is `engram`."""

    def __init__(self, section: EngramSection, vocab_size: int, tp_group: Sequence[int]) -> None:
        super().__init__()
        self.section = section
        self.token_map = Parameter(shape=(vocab_size,), dtype="int32")
        for layer_id in section.config.layer_ids:
            name = layer_prefix(layer_id).rpartition(".")[2]
            setattr(self, name, EngramLayer(section, layer_id, tp_group))
        self._ids: ITensor = None

    def add_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a model, and those of the history besides."""
        if self.section.history == "kv_phantom":
            return inputs
        ids = inputs["input_ids"]
        added = {CU_SEQLENS: front_end.request_input(CU_SEQLENS, ids, 1)}
        if self.section.history == "explicit":
            window = (self.section.config.max_ngram_size - 1,)
            added[LOOKBACK_IDS] = front_end.request_input(LOOKBACK_IDS, ids, 0, window)
        return inputs | added

    def hash(self, inputs: dict[str, Any], slot_bytes: int) -> dict[str, Any]:
        """Adds the hash node, once per model; returns the inputs that are left for the decoder.
        slot_bytes: of a token's key in an attention layer of one head."""
        if not self.token_map.is_inited():
            raise InputError(
                "trtllm-build: expected --checkpoint_dir, of trtllm-engram trtllm-checkpoint; "
                "found a config alone: Engram has no use for made-up weights"
            )
        layout = EngramLayout(self.section.config)
        if layout.fingerprint(self.token_map.raw_value) != self.section.fingerprint:
            raise InputError(
                "engram.token_map: expected the token map of engram.fingerprint in config.json, "
                "found another"
            )
        if self.section.history == "kv_phantom":
            self._ids = network.paged_hash_ids(
                front_end.network(),
                layout,
                self.token_map.value.trt_tensor,
                inputs["input_ids"].trt_tensor,
                phantom.cache_tensors(inputs),
                tokens_per_block=front_end.plugin_setting("tokens_per_block"),
                slot_bytes=slot_bytes,
                name="engram/hash",
            )
            return inputs
        boundaries = inputs.pop(CU_SEQLENS).trt_tensor
        lookback = inputs.pop(LOOKBACK_IDS, None)
        net = front_end.network()
        hashed = network.hash_ids(
            net,
            layout,
            self.token_map.value.trt_tensor,
            _flat(inputs["input_ids"]),
            _flat(inputs["position_ids"]),
            boundaries,
            None if lookback is None else lookback.trt_tensor,
            next_lookback=lookback is not None,
            name="engram/hash",
        )
        if lookback is not None:
            network.mark_output(net, NEXT_LOOKBACK_IDS, hashed.next_lookback_ids)
        self._ids = hashed.ids
        return inputs

    def add(self, layer_id: int, hidden: Any) -> Any:
        """The residual stream with a layer's value added."""
        if self._ids is None:
            raise InputError(
                "EngramDecoder: expected the model's forward to call hash() before its layers"
            )
        layer = getattr(self, layer_prefix(layer_id).rpartition(".")[2])
        return layer(self._ids, hidden)


class EngramLayer(Module):  # type: ignore[misc]
    """A layer's weights, named as section.py says, and its three plugins. tp_group: the ranks that
    have the parts of a projection which is split."""

    def __init__(self, section: EngramSection, layer_id: int, tp_group: Sequence[int]) -> None:
        super().__init__()
        config = section.config
        self.section, self.layer_id, self.tp_group = section, layer_id, tp_group
        num_outputs = config.kv_dim // section.projection_ranks
        self.words = Parameter(shape=(num_outputs, config.row_dim // _WORD_BYTES), dtype="int32")
        blocks = math.prod(-(-size // SCALE_BLOCK) for size in (num_outputs, config.row_dim))
        self.scales = Parameter(shape=(-(-blocks // _WORD_BYTES),), dtype="int32")
        copies = (config.hc_mult, config.hidden_size)
        self.query = Parameter(shape=copies, dtype="bfloat16")
        self.key = Parameter(shape=copies, dtype="bfloat16")

    def forward(self, ids: ITensor, hidden: Any) -> Any:
        """ids INT32 [T, L, C]; hidden [..., hidden] or [..., hc_mult * hidden] or with both, packed
        or padded; the same comes out."""
        config = self.section.config
        net, stream = front_end.network(), hidden.trt_tensor
        copies = net.add_shuffle(stream)
        copies.reshape_dims = (-1, config.hc_mult, config.hidden_size)
        out = network.gate(
            net,
            copies.get_output(0),
            self._kv(ids),
            self.query.value.trt_tensor,
            self.key.value.trt_tensor,
            config.rms_norm_eps,
            name=f"engram/layer_{self.layer_id}/gate",
        )
        back = net.add_shuffle(out)
        if tuple(stream.shape).count(-1) <= 1:
            back.reshape_dims = tuple(stream.shape)
        else:
            back.set_input(1, net.add_shape(stream).get_output(0))
        return front_end.wrapped(back.get_output(0), back)

    def _kv(self, ids: ITensor) -> ITensor:
        """BF16 [T, (hc_mult+1)*hidden]."""
        config, name = self.section.config, f"engram/layer_{self.layer_id}"
        net = front_end.network()
        rows = network.lookup(
            net,
            ids,
            table=self.section.tables[self.layer_id],
            fingerprint=self.section.fingerprint,
            layer=self.layer_id,
            layer_idx=config.layer_ids.index(self.layer_id),
            head_dim=config.head_dim,
            name=f"{name}/lookup",
        )
        kv = network.project(
            net,
            rows,
            self.words.value.trt_tensor,
            self.scales.value.trt_tensor,
            self.section.weight_layout,
            name=f"{name}/project",
        )
        if self.section.projection_ranks == 1:
            return kv
        return front_end.gather_columns(kv, self.tp_group)


def _flat(tensor: Any) -> ITensor:
    """[T] of packed tokens as they are, or of padded ones [B, S]."""
    if len(tensor.trt_tensor.shape) == 1:
        return tensor.trt_tensor
    layer = front_end.network().add_shuffle(tensor.trt_tensor)
    layer.reshape_dims = (-1,)
    return layer.get_output(0)
