# SPDX-License-Identifier: Apache-2.0
"""Tables that stay on disk, and ids of every kind to look up in them."""

import numpy as np

from trtllm_engram.runtime import Tables, ops

LAYER = 5
FORMS = {
    "bf16": (Tables.lookup, ops.lookup, {}),
    "packed": (Tables.lookup_packed, ops.lookup_packed, {}),
    "mxfp8_linear": (Tables.lookup_mxfp8, ops.lookup_mxfp8, {}),
    "mxfp8_128x4": (Tables.lookup_mxfp8, ops.lookup_mxfp8, {"scale_order": "128x4"}),
}


def bind(store, **options):
    tables = Tables()
    tables.bind("mine", store, layer=LAYER, placement="disk", **options)
    return tables


def random_ids(store, num_tokens, seed=0):
    """Of every kind: rows, no rows, far outside, the first and the last."""
    rows = store.config.num_embeddings[store.config.layer_ids.index(LAYER)]
    shape = (num_tokens, store.config.num_columns)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, rows, shape, np.int32)
    odd = rng.choice(np.array([-1, 0, rows - 1, rows, 2**31 - 1, -(2**31)], np.int32), shape)
    return np.where(rng.random(shape) < 0.1, odd, ids)


def last_row(store):
    return store.config.num_embeddings[store.config.layer_ids.index(LAYER)] - 1


def same(found, expected):
    found, expected = (one if isinstance(one, tuple) else (one,) for one in (found, expected))
    for actual, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(actual.view(np.uint8), wanted.view(np.uint8))
