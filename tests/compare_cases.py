# SPDX-License-Identifier: Apache-2.0
"""What tests of comparisons share: outputs that are changed, tables that are wrong."""

import pytest
from engines import V4_COLUMNS, WRONG, wrong_store

from trtllm_engram.builder.model import ModelOptions, hidden_out_name, packed_names, rows_name
from trtllm_engram.runtime.compare import Reference

SIZES = {**V4_COLUMNS, "layers": (1, 14)}  # engine_fixtures' store's
OUT = hidden_out_name(1)

# What an engine gives out for checks, and which of layer 1 the three wrong tables break.
FORMS = {
    "rows": (ModelOptions(check_outputs=True), [rows_name(1)]),
    "linear": (ModelOptions(check_mxfp8="linear"), packed_names(1)[:2]),
    "128x4": (ModelOptions(check_mxfp8="128x4"), packed_names(1)[::2]),
}
in_each_form = pytest.mark.parametrize("form", FORMS)
with_each_wrong_table = pytest.mark.parametrize(
    "spoil", [None, *WRONG.values()], ids=["right", *WRONG]
)


def by_name(comparisons):
    return {one.name: one for one in comparisons}


def changed(outputs, name, change):
    """The outputs with one of them copied and changed."""
    array = outputs[name].copy()
    return outputs | {name: change(array)}


def spoilt(store, folder, spoil, feed):
    """The store, or for a `spoil` one whose layer 1 is wrong in a row that the feed reads."""
    if spoil is None:
        return store
    ids = Reference(store)(feed)["hash_ids"][:, 0]
    return wrong_store(folder, spoil, 1, int(ids[ids >= 0][7]), **SIZES)


def tables_toml(folder, stores):
    """Binds each layer to its store."""
    path = folder / "tables.toml"
    lines = ["format_version = 1"]
    for layer, store in stores.items():
        lines += [f"[tables.engram_{layer}]", f'store = "{store.path}"', f"layer = {layer}"]
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return path
