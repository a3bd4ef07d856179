# SPDX-License-Identifier: Apache-2.0
"""Tables over the memory of several GPUs: each rank holds a part, all ranks read all parts.

python examples/sharded_tables.py --ranks 2             # made-up tables of 1 GB; GPUs in turn
python examples/sharded_tables.py --ranks 2 --gb 203    # V4.1-Flash's, over two GPUs of 141 GB
python examples/sharded_tables.py --ranks 2 --kill 1    # rank 1 is killed: the others read on
python examples/sharded_tables.py --ranks 2 --store DIR # those of a store that `prepare` made

Each rank binds the tables, checks rows of all layers and parts against the formula of made-up
tables, and measures lookups of rows that lie with itself, with the next rank, and anywhere. Needs
torch.
"""

import json
import sys
import time

import numpy as np
from ranks import events, new_parser, run

from trtllm_engram.builder.formula import row_bytes
from trtllm_engram.builder.manifest import read_manifest
from trtllm_engram.plugins.errors import EngramError
from trtllm_engram.runtime import Tables, ops
from trtllm_engram.runtime.group import Group

try:
    import torch
except ModuleNotFoundError:
    torch = None

SEED = 1
CHECKED, MEASURED, CALLS = 256, 65536, 10  # tokens of a lookup; lookups that are timed


def rank_main(args):
    """One rank: binds, then says what it reads, and again for every line that the parent sends."""
    torch.cuda.set_device(args.rank % torch.cuda.device_count())
    torch.zeros(1, device="cuda")  # the thread's GPU from here on, and the rank's
    manifest = read_manifest(args.store)
    options = {"store": args.store, "placement": "device_sharded"}
    if args.made_up:
        options["formula_seed"] = SEED
    with Tables(Group(args.group, args.rank, args.ranks, timeout_s=args.timeout)) as tables:
        started = time.perf_counter()
        tables.bind_all(
            {f"engram_{layer}": {"layer": layer, **options} for layer in manifest.config.layer_ids}
        )
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, **what_is_read(args, tables, manifest)}), flush=True)
        for _ in sys.stdin:
            print(json.dumps(what_is_read(args, tables, manifest)), flush=True)


def what_is_read(args, tables, manifest):
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    held = {name: table["num_bytes"] for name, table in tables.describe().items()}
    following = (args.rank + 1) % args.ranks
    parts = {"own": args.rank, f"rank {following}'s": following, "all": None}
    speeds = {}
    for name, part in parts.items():
        if args.made_up:
            for index, layer in enumerate(manifest.config.layer_ids):
                check(tables, manifest, layer, part_ids(args, manifest, index, part, CHECKED))
        speeds[name] = gigabytes_a_second(
            tables, manifest, part_ids(args, manifest, 0, part, MEASURED)
        )
    return {"gpu": gpu.name, "bytes": held, "gb_per_s": speeds}


def part_ids(args, manifest, index, part, num_tokens):
    """Row ids [T, C] of the store's layer number `index`: one of each column, of a rank's part
    where one is given."""
    rows, offsets = manifest.layout.primes[index].ravel(), manifest.layout.offsets[index]
    low, high = (0, args.ranks) if part is None else (part, part + 1)
    places = np.random.default_rng(num_tokens).random((num_tokens, rows.size))
    places = (low + places * (high - low)) / args.ranks
    return (offsets + (places * rows).astype(np.int64)).astype(np.int32)


def check(tables, manifest, layer, ids):
    found = tables.lookup(f"engram_{layer}", torch.from_numpy(ids).cuda())
    made_up = row_bytes(manifest.config, layer, ids.ravel(), SEED)
    right = ops.lookup(*made_up, np.arange(ids.size, dtype=np.int32).reshape(ids.shape))
    if not np.array_equal(found.view(torch.int16).cpu().numpy(), right.view(np.int16)):
        raise EngramError(f"engram_{layer}: expected the formula's rows, found others")


def gigabytes_a_second(tables, manifest, ids):
    """Bytes of the first layer's rows that lookups read, over their time on the GPU."""
    layer = manifest.config.layer_ids[0]
    given, out = torch.from_numpy(ids).cuda(), None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for call in range(-3, CALLS):
        if call == 0:
            begin.record()
        out = tables.lookup(f"engram_{layer}", given, out=out)
    end.record()
    end.synchronize()
    head_dim = manifest.config.head_dim
    read = CALLS * ids.size * (head_dim + head_dim // 32)
    return read / begin.elapsed_time(end) / 1e6


def parent_main(args, store, made_up):
    if torch is None:
        raise EngramError("expected torch, which measures here, found none: pip install torch")
    if not torch.cuda.is_available():
        raise EngramError("expected a GPU that torch can use, found none")
    for event, readers in events(args, store, made_up):
        report(args, readers, event)


def report(args, readers, event):
    if args.json:
        print(json.dumps({"event": event, "ranks": readers}))
        return
    print(event)
    for reader in readers:
        held = sum(reader["bytes"].values()) / 1e9
        seconds = f", bound in {reader['seconds']:.1f} s" if "seconds" in reader else ""
        speeds = ", ".join(f"{part} {speed:.0f}" for part, speed in reader["gb_per_s"].items())
        print(f"  rank {reader['rank']}, {reader['gpu']}: holds {held:.2f} GB{seconds}")
        print(f"    reads rows in GB/s: {speeds}")


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object for each event")
    run(parser, rank_main, parent_main)
