# SPDX-License-Identifier: Apache-2.0
"""Processes of one node share tables: one copy in memory, whatever their number.

python examples/shared_tables.py --ranks 4              # made-up tables of 1 GB, filled in memory
python examples/shared_tables.py --ranks 4 --kill 2     # rank 2 is killed: the others keep theirs
python examples/shared_tables.py --ranks 4 --store DIR  # those of a store that `prepare` made

Each rank binds the tables, checks some rows and says what it holds. Under mpirun, srun or torchrun
a program says no more than `Tables()`: the launcher's variables tell who shares.
"""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
from ranks import events, new_parser, run

from trtllm_engram.builder.formula import row_bytes
from trtllm_engram.builder.manifest import read_manifest
from trtllm_engram.plugins.errors import EngramError
from trtllm_engram.runtime import Group, Tables, ops

SEED = 1
CHECKED = 128  # tokens whose rows each rank looks up


def rank_main(args):
    """One rank: binds, then says what it holds, and again for every line that the parent sends."""
    config = read_manifest(args.store).config
    options = {"store": args.store, "memory": args.memory, "numa": args.numa}
    if args.made_up:
        options["formula_seed"] = SEED
    group = Group(args.group, args.rank, args.ranks, timeout_s=args.timeout)
    with Tables(group) as tables:
        tables.bind_all(
            {f"engram_{layer}": {"layer": layer, **options} for layer in config.layer_ids}
        )
        print(json.dumps(what_is_held(tables, config, args.made_up)), flush=True)
        for _ in sys.stdin:
            print(json.dumps(what_is_held(tables, config, args.made_up)), flush=True)


def what_is_held(tables, config, made_up):
    held = tables.describe()
    for name, table in held.items():
        shape = (CHECKED, config.num_columns)
        ids = np.linspace(0, table["num_rows"] - 1, CHECKED * config.num_columns)
        ids = ids.astype(np.int32).reshape(shape)
        rows = tables.lookup(name, ids)
        if made_up:
            right_table = row_bytes(config, table["layer"], ids.ravel(), SEED)
            right = ops.lookup(*right_table, np.arange(ids.size, dtype=np.int32).reshape(shape))
            if not np.array_equal(rows.view(np.uint16), right.view(np.uint16)):
                raise EngramError(f"{name}: expected the formula's rows, found others")
    return {"pid": os.getpid(), "pss_bytes": pss_bytes(), "tables": held}


def pss_bytes():
    """This process's memory: what it shares counts in parts, one for each that shares it."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)[1]) * 1024


def parent_main(args, store, made_up):
    told = dict(events(args, store, made_up, ("memory", "numa")))
    if args.json:
        print(json.dumps(told, indent=2))
    else:
        for event, holders in told.items():
            show(event, holders)


def show(event, holders):
    print(f"{event}:")
    for holder in holders:
        for name, table in holder["tables"].items():
            huge = table["huge_bytes"] / table["num_bytes"]
            print(
                f"  rank {holder['rank']}, pid {holder['pid']}: {name}, "
                f"{table['num_bytes'] / 1e6:.0f} MB of {table['memory']}, {huge:.0%} on 2 MiB pages"
            )
    if holders:
        table_bytes = sum(table["num_bytes"] for table in holders[0]["tables"].values())
        pss = sum(holder["pss_bytes"] for holder in holders)
        print(f"  tables {table_bytes / 1e6:.0f} MB, all ranks together {pss / 1e6:.0f} MB (PSS)")


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--memory", metavar="KIND", help="memfd (default), shm, cumem or private")
    parser.add_argument("--numa", metavar="POLICY", help="default, local, interleave, node:N, gpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    run(parser, rank_main, parent_main)
