# SPDX-License-Identifier: Apache-2.0
"""Runs Engram: stores, eager ops, sessions, the command line. Imports load no native library."""

from trtllm_engram.runtime.store import LayerWeights, Store, Table, open_store
from trtllm_engram.runtime.tables import Tables

__all__ = ["LayerWeights", "Store", "Table", "Tables", "open_store"]
