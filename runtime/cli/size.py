# SPDX-License-Identifier: Apache-2.0
"""`size`: bytes of a model's tables against the memory of this machine, or of other ones."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from trtllm_engram.builder import EngramConfig
from trtllm_engram.builder.manifest import MANIFEST_FILE, read_manifest
from trtllm_engram.plugins.errors import InputError

from .. import machine
from ..data_files import flash_layout
from ..gpus import probe_driver
from ..row import packed_row_bytes
from ..sizing import Nodes, placements
from . import console, shared_options

EXAMPLE = "trtllm-engram size --gpus 8 --nodes 2 --gpu-memory 141 --ram 2000"

_GB = 10**9
_DISK_GB_PER_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Which placement of a model's tables fits where: bytes of each node and GPU, how long the\n"
        "files take to read, and how many tokens a second lookups allow one GPU, by the rates\n"
        "measured on an H200 (docs/scaling.md); a dash where none was measured. Nothing is shared\n"
        "between nodes: every node needs what one needs."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a store, a checkpoint folder or a config.json (default: V4.1-Flash)",
    )
    parser.add_argument(
        "--gpus",
        metavar="N",
        type=shared_options.integer(0),
        help="of each node (default: this machine's)",
    )
    parser.add_argument(
        "--nodes", metavar="N", type=shared_options.integer(1), default=1, help="default: 1"
    )
    parser.add_argument(
        "--gpu-memory", metavar="GB", type=shared_options.number(0, 1e9), help="of each GPU"
    )
    parser.add_argument(
        "--ram", metavar="GB", type=shared_options.number(0, 1e9), help="of each node"
    )
    parser.add_argument(
        "--numa-nodes", metavar="N", type=shared_options.integer(1), help="of each node"
    )
    parser.add_argument(
        "--disk",
        metavar="GB/S",
        type=shared_options.number(0.001, 1e9),
        default=_DISK_GB_PER_S,
        help=f"that a node reads files at (default: {_DISK_GB_PER_S:g}, an NVMe drive)",
    )
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    config = flash_layout().config if args.model is None else _read_config(Path(args.model))
    nodes = _nodes(args)
    found = placements(config, nodes)
    if args.json:
        document = {"machine": asdict(nodes), "placements": [asdict(one) for one in found]}
        console.print_json(document)
        return 0
    out = console.stdout()
    pairs: list[tuple[str, object]] = []
    for layer_id, rows in zip(config.layer_ids, config.num_embeddings, strict=True):
        table_bytes = console.human_bytes(rows * packed_row_bytes(config.head_dim))
        pairs.append((f"layer {layer_id}", f"{rows} rows, {table_bytes}"))
    gpus = (
        f"{nodes.num_gpus} GPUs of {console.human_bytes(nodes.gpu_bytes)}"
        if nodes.num_gpus
        else "no GPU"
    )
    numa = f" in {nodes.numa_nodes} NUMA nodes" if nodes.numa_nodes > 1 else ""
    name = "node" if nodes.num_nodes == 1 else f"{nodes.num_nodes} nodes"
    pairs.append((name, f"{console.human_bytes(nodes.ram_bytes)} of RAM{numa}, {gpus}"))
    pairs.append(("files", f"read at {console.human_bytes(nodes.disk_bytes_per_s)}/s"))
    console.print_pairs(pairs, out)
    out.print()
    shown = [
        (
            one.name,
            console.human_bytes(one.ram_bytes) if one.ram_bytes else "-",
            console.human_bytes(one.gpu_bytes) if one.gpu_bytes else "-",
            Text("yes", style="green") if one.fits else Text("no", style="yellow"),
            console.human_seconds(one.load_seconds) if one.load_seconds else "-",
            console.human_count(one.tokens_per_s) if one.tokens_per_s else "-",
            one.what,
        )
        for one in found
    ]
    headings = (
        *("placement", ">RAM", ">each GPU", "fits"),
        *(">load", ">tokens/s", "rows lie in"),
    )
    console.print_table(headings, shown, out)
    return 0


def _read_config(model: Path) -> EngramConfig:
    if (model / MANIFEST_FILE).exists():
        return read_manifest(model).config
    return EngramConfig.from_pretrained(model)


def _nodes(args: argparse.Namespace) -> Nodes:
    gpus = probe_driver().gpus
    num_gpus = len(gpus) if args.gpus is None else args.gpus
    if num_gpus and args.gpu_memory is None and not gpus:
        raise InputError("--gpu-memory: expected GB of a GPU where this machine has none")
    smallest = min((gpu.total_bytes for gpu in gpus), default=0)
    gpu_bytes = smallest if args.gpu_memory is None else int(args.gpu_memory * _GB)
    ram_bytes = machine.usable_memory_bytes() if args.ram is None else int(args.ram * _GB)
    numa_nodes = args.numa_nodes or max(1, len(machine.numa_nodes()))
    return Nodes(args.nodes, ram_bytes, num_gpus, gpu_bytes, numa_nodes, args.disk * _GB)
