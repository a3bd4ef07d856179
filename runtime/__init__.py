# SPDX-License-Identifier: Apache-2.0
"""Runs Engram: stores, eager ops, sessions, the command line. Imports load no native library."""

from trtllm_engram.runtime.store import LayerWeights, Store, Table, open_store

__all__ = ["LayerWeights", "Store", "Table", "open_store"]
