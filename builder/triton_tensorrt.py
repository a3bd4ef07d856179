# SPDX-License-Identifier: Apache-2.0
"""The tensorrt form: an engine of `build --flat-hidden` in Triton's TensorRT backend.

token_ids              INT32 [1, T]
positions              INT64 [1, T], of each token in its text
lookback_ids           INT32 [1, N-1]; none with sequences
layers.{i}.hidden      [1, T, hc_mult, hidden]
layers.{i}.hidden_out  the same
next_lookback_ids      INT32 [1, N-1]; none with sequences

The backend joins the tokens of the requests of a batch, and their residual streams as bare values;
cu_seqlens it makes of the numbers of tokens, and by these it shares the outputs out. A request is
one text: a batch of its own of more rows than one has no boundaries between them.

What is joined must fit the engine. Triton asks BATCHER_FILE, this library, about every request that
it may add to a batch; bad ones it cancels; it binds the tables as the model is loaded and unbinds
them as it goes (cpp/src/triton/batcher.cpp). With sequences Triton takes no such library: there
FRONT_FILE, this library again, stands before the backend and does the same (front.cpp beside it).

With sequences, next_lookback_ids is the state that Triton hands to lookback_ids of the sequence's
next request; its first request has -1, nothing, in initial_state/.
"""

from __future__ import annotations

import numpy as np

from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.model import hidden_name, hidden_out_name
from trtllm_engram.builder.pbtxt import Word
from trtllm_engram.builder.triton import (
    TYPES,
    Message,
    Serving,
    parameters,
    sequence_batching,
    tensor,
)

PLAN_FILE = "model.plan"
# Within the model's folder.
NO_PAST_FILE = "initial_state/no_past"
TABLES_FILE = "tables.toml"
BATCHER_FILE = "batchstrategy.so"
FRONT_FILE = "libtriton_tensorrt.so"  # the backend's own name: the server looks here first
# The parameters that either reads.
MAX_TOKENS = "max_tokens"
VOCAB_SIZE = "vocab_size"
TABLES = "tables"  # names, with a comma between them
_PROFILES = ["0", "1"]  # decode and prefill, of builder.engine.default_profiles


def tensorrt_config(config: EngramConfig, serving: Serving) -> Message:
    """config.pbtxt for an engine with this residual dtype and at least max_batch requests.
    Parameters: MAX_TOKENS, of the engine, VOCAB_SIZE and TABLES."""
    window = [config.max_ngram_size - 1]
    hidden = TYPES[serving.hidden_dtype]
    residual = [-1, config.hc_mult, config.hidden_size]
    inputs = [_ragged("token_ids", "TYPE_INT32", [-1]), _ragged("positions", "TYPE_INT64", [-1])]
    inputs += [_ragged(hidden_name(layer), hidden, residual) for layer in config.layer_ids]
    scattered = [hidden_out_name(layer) for layer in config.layer_ids]
    outputs = [tensor(name, hidden, residual) for name in scattered]
    if not serving.sequences:
        inputs.append(tensor("lookback_ids", "TYPE_INT32", window))
        outputs.append(tensor("next_lookback_ids", "TYPE_INT32", window))
    return {
        "backend": "tensorrt",
        "default_model_filename": PLAN_FILE,
        "max_batch_size": serving.max_batch,
        "input": inputs,
        "output": outputs,
        "batch_input": [
            {
                "kind": Word("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"),
                "target_name": ["cu_seqlens"],
                "data_type": Word("TYPE_INT32"),
                "source_input": ["token_ids"],
            }
        ],
        "batch_output": [
            {
                "kind": Word("BATCH_SCATTER_WITH_INPUT_SHAPE"),
                "target_name": [name],
                "source_input": ["token_ids"],
            }
            for name in scattered
        ],
        "instance_group": [serving.instance_group() | {"profile": _PROFILES}],
        **(
            sequence_batching(state=[_state(window)])
            if serving.sequences
            else {"dynamic_batching": _closed_when_queued(serving.max_batch)}
        ),
        "optimization": {
            "cuda": {
                "graphs": True,
                "graph_spec": [_graph(config, size) for size in sorted({1, serving.max_batch})],
            }
        },
        **({"parameters": parameters(serving.parameters)} if serving.parameters else {}),
    }


def no_past(config: EngramConfig) -> bytes:
    """What NO_PAST_FILE holds: lookback_ids of a text that begins."""
    return np.full(config.max_ngram_size - 1, -1, np.int32).tobytes()


def _ragged(name: str, data_type: str, dims: list[int]) -> Message:
    return tensor(name, data_type, dims) | {"allow_ragged_batch": True}


def _closed_when_queued(max_batch: int) -> Message:
    """Triton lets a batch that waits for an instance grow, and counts its tokens from zero again,
    unless its size is one that is preferred."""
    return {"preferred_batch_size": list(range(1, max_batch + 1))}


def _state(window: list[int]) -> Message:
    initial = {
        "name": "no past",
        "data_type": Word("TYPE_INT32"),
        "dims": window,
        "data_file": NO_PAST_FILE.rpartition("/")[2],
    }
    return {
        "input_name": "lookback_ids",
        "output_name": "next_lookback_ids",
        "data_type": Word("TYPE_INT32"),
        "dims": window,
        "initial_state": [initial],
    }


def _graph(config: EngramConfig, size: int) -> Message:
    """A CUDA graph of a decode step: a token each of `size` requests. Sizes are those after the
    backend has joined the requests, without the batch's own where it has one."""
    values = size * config.hc_mult * config.hidden_size
    dims = {
        "token_ids": size,
        "positions": size,
        "cu_seqlens": size + 1,
        "lookback_ids": config.max_ngram_size - 1,
        **{hidden_name(layer): values for layer in config.layer_ids},
    }
    inputs = [{"key": name, "value": {"dim": [one]}} for name, one in dims.items()]
    return {"batch_size": size, "input": inputs}
