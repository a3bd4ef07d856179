# SPDX-License-Identifier: Apache-2.0
"""Processes of one node share tables: one copy in memory, whatever their number.

python examples/shared_tables.py --ranks 4              # made-up tables of 1 GB, filled in memory
python examples/shared_tables.py --ranks 4 --kill 2     # rank 2 is killed: the others keep theirs
python examples/shared_tables.py --ranks 4 --store DIR  # those of a store that `prepare` made

Each rank binds the tables, checks some rows and says what it holds. Under mpirun, srun or torchrun
a program says no more than `Tables()`: the launcher's variables tell who shares.
"""

import argparse
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from trtllm_engram.builder.formula import row_bytes
from trtllm_engram.builder.made_up import config_of_size, write_made_up_store
from trtllm_engram.builder.manifest import read_manifest
from trtllm_engram.plugins.errors import EngramError, InputError
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


class Rank:
    """A rank as its parent sees it."""

    def __init__(self, rank, words):
        self.rank = rank
        command = [sys.executable, __file__, "--rank", str(rank), *words]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes)

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise EngramError(f"rank {self.rank}: expected what it holds, found exit code {code}")
        return {"rank": self.rank, **json.loads(line)}

    def ask(self):
        print("again", file=self.process.stdin, flush=True)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def parent_main(args, store, made_up):
    words = ["--ranks", str(args.ranks), "--store", store, "--group", secrets.token_hex(8)]
    words += ["--timeout", str(args.timeout), *(["--made-up"] if made_up else [])]
    for option in ("memory", "numa"):
        if getattr(args, option) is not None:
            words += [f"--{option}", getattr(args, option)]
    ranks = [Rank(rank, words) for rank in range(args.ranks)]
    try:
        loaded = [rank.answer() for rank in ranks]
        events = {"loaded": loaded}
        if args.kill is not None:
            victim = ranks.pop(args.kill)
            victim.process.send_signal(signal.SIGKILL)
            victim.end()
            for rank in ranks:
                rank.ask()
            events[f"rank {args.kill} killed"] = [rank.answer() for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    if args.json:
        print(json.dumps(events, indent=2))
    else:
        for event, holders in events.items():
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", metavar="N", type=int, required=True)
    parser.add_argument("--kill", metavar="RANK", type=int, help="kill -9 it once all have loaded")
    parser.add_argument("--store", metavar="DIR", help="default: made-up tables")
    parser.add_argument("--gb", type=float, default=1.0, help="of the made-up tables (default: 1)")
    parser.add_argument("--memory", metavar="KIND", help="memfd (default), shm, cumem or private")
    parser.add_argument("--numa", metavar="POLICY", help="default, local, interleave, node:N, gpu")
    parser.add_argument("--timeout", metavar="S", type=float, default=120.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for hidden in ("--rank", "--group", "--made-up"):  # what a rank is told by its parent
        kind = {"action": "store_true"} if hidden == "--made-up" else {}
        parser.add_argument(hidden, help=argparse.SUPPRESS, **kind)
    args = parser.parse_args()
    if args.ranks < 1 or args.kill not in (None, *range(args.ranks)):
        parser.error(f"expected --kill RANK below --ranks N, found {args.kill} and {args.ranks}")
    if args.rank is not None:
        args.rank = int(args.rank)
        rank_main(args)
    elif args.store is not None:
        parent_main(args, args.store, made_up=False)
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_made_up_store(folder, config_of_size(int(args.gb * 1e9)))
            parent_main(args, folder, made_up=True)


if __name__ == "__main__":
    try:
        main()
    except (EngramError, InputError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
