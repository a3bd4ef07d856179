# SPDX-License-Identifier: Apache-2.0
"""Lookups on a GPU by a path that a test chooses, and their twins."""

import numpy as np
import pytest
import reference

from trtllm_engram.builder.formula import row_bytes
from trtllm_engram.runtime import _native
from trtllm_engram.runtime.call import Call
from trtllm_engram.runtime.lookup_call import take_ids, to_bf16, to_mxfp8, to_packed

FORMS = ["bf16", "packed", "linear", "128x4"]
every_form = pytest.mark.parametrize("form", FORMS)


def look_up(form, table, ids, path=_native.LookupPath.SORTED, blocks=0, **outs):
    """`table` is what a call reads: LookupArgs without ids."""
    call = Call("lookup", None, ids=ids, **outs)
    args = take_ids(call, table())
    args.path, args.num_read_blocks = path, blocks
    if form == "bf16":
        return [to_bf16(call, args)]
    if form == "packed":
        return [to_packed(call, args)]
    return list(to_mxfp8(call, args, form))


def twin(form, values, scales, ids, first_row=0):
    if form == "bf16":
        return [reference.lookup(values, scales, ids, first_row)]
    if form == "packed":
        return [reference.lookup_packed(values, scales, ids, first_row)]
    row_values, row_scales = reference.lookup_mxfp8(values, scales, ids, first_row)
    return [row_values, row_scales if form == "linear" else reference.scales_128x4(row_scales)]


def some_ids(config, seed, num_tokens=700):
    """Half of them of few rows, so that tokens share them, some of none, few lost."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, config.num_embeddings[0], (num_tokens, config.num_columns))
    few = rng.integers(0, 50, ids.shape) * 31
    kind = rng.random(ids.shape)
    none = np.where(kind < 0.54, -1, reference.LOST)
    return np.where(kind < 0.5, few, np.where(kind < 0.55, none, ids)).astype(np.int32)


def formula_rows(config, ids):
    """Values, scales and ids that find in them the rows of the table."""
    rows, places = np.unique(ids[ids >= 0], return_inverse=True)
    near = ids.copy()
    near[ids >= 0] = places
    return *row_bytes(config, 1, rows, 3), near
