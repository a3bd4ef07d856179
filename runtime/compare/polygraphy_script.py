# SPDX-License-Identifier: Apache-2.0
"""The functions that polygraphy takes from a script's path: an import by path is another module, so
here is nothing but their names."""

from trtllm_engram.runtime.compare.polygraphy_runner import compare_outputs, load_data

__all__ = ["compare_outputs", "load_data"]
