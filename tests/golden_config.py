# SPDX-License-Identifier: Apache-2.0
"""Configs of the golden hash vectors, as a config.json would hold them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden"


def golden_primes(name: str) -> np.ndarray:
    """[L, N-1, H] of hash_full or hash_tiny."""
    return np.array(json.loads((GOLDEN / f"{name}.json").read_bytes())["primes"], dtype=np.int64)


def golden_config(name: str, **changes: Any) -> dict[str, Any]:
    """config.json of hash_full or hash_tiny, with true V4.1-Flash sizes elsewhere."""
    data = json.loads((GOLDEN / f"{name}.json").read_bytes())
    config = {key: value for key, value in data.items() if key.startswith("engram_")}
    if config["engram_num_embeddings"] is None:
        config["engram_num_embeddings"] = golden_primes(name).sum(axis=(1, 2)).tolist()
    return config | {"hidden_size": 5120, "hc_mult": 4, "rms_norm_eps": 1e-6} | changes
