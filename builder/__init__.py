# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint to a store: config, layout, token map, tables."""

from trtllm_engram.builder.config import EngramConfig
from trtllm_engram.builder.layout import EngramLayout
from trtllm_engram.builder.token_map import build_token_map, token_map_digest

__all__ = ["EngramConfig", "EngramLayout", "build_token_map", "token_map_digest"]
