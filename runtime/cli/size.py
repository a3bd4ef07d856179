# SPDX-License-Identifier: Apache-2.0
"""`size`: bytes of a model's tables against the memory of this machine, or of another one."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.text import Text

from trtllm_engram.builder import EngramConfig
from trtllm_engram.builder.manifest import MANIFEST_FILE, read_manifest
from trtllm_engram.plugins.errors import InputError

from .. import machine
from ..gpus import probe_driver
from ..row import num_blocks, packed_row_bytes
from . import console

EXAMPLE = "trtllm-engram size config.json --gpus 8 --gpu-memory 141 --ram 2000"

_GB = 10**9


@dataclass(frozen=True)
class _Machine:
    ram_bytes: int
    num_gpus: int
    gpu_bytes: int  # of each
    numa_nodes: int


@dataclass(frozen=True)
class _Placement:
    """What one placement of all tables needs of a node's RAM and of each of its GPUs."""

    name: str
    what: str
    ram_bytes: int
    gpu_bytes: int
    fits: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a store, a checkpoint folder or a config.json"
    )
    parser.add_argument("--gpus", metavar="N", type=int, help="GPUs (default: this machine's)")
    parser.add_argument("--gpu-memory", metavar="GB", type=float, help="of each GPU")
    parser.add_argument("--ram", metavar="GB", type=float, help="of the node")
    parser.add_argument("--numa-nodes", metavar="N", type=int, help="of the node")
    console.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    config = _read_config(Path(args.model))
    node = _machine(args)
    placements = _placements(config, node)
    if args.json:
        document = {"machine": asdict(node), "placements": [asdict(one) for one in placements]}
        console.print_json(document)
        return 0
    out = console.stdout()
    pairs: list[tuple[str, object]] = []
    for layer_id, rows in zip(config.layer_ids, config.num_embeddings, strict=True):
        table_bytes = console.human_bytes(rows * _row_bytes(config))
        pairs.append((f"layer {layer_id}", f"{rows} rows, {table_bytes}"))
    gpus = (
        f"{node.num_gpus} GPUs of {console.human_bytes(node.gpu_bytes)}"
        if node.num_gpus
        else "no GPU"
    )
    nodes = f" in {node.numa_nodes} NUMA nodes" if node.numa_nodes > 1 else ""
    pairs.append(("node", f"{console.human_bytes(node.ram_bytes)} of RAM{nodes}, {gpus}"))
    console.print_pairs(pairs, out)
    out.print()
    rows_shown = [
        (
            one.name,
            console.human_bytes(one.ram_bytes) if one.ram_bytes else "-",
            console.human_bytes(one.gpu_bytes) if one.gpu_bytes else "-",
            Text("yes", style="green") if one.fits else Text("no", style="yellow"),
            one.what,
        )
        for one in placements
    ]
    console.print_table(("placement", ">RAM", ">each GPU", "fits", "rows lie in"), rows_shown, out)
    return 0


def _read_config(model: Path) -> EngramConfig:
    if (model / MANIFEST_FILE).exists():
        return read_manifest(model).config
    return EngramConfig.from_pretrained(model)


def _machine(args: argparse.Namespace) -> _Machine:
    for name, least in (("gpus", 0), ("gpu_memory", 0), ("ram", 0), ("numa_nodes", 1)):
        value = getattr(args, name)
        if value is not None and not least <= value <= 1e9:
            raise InputError(
                f"--{name.replace('_', '-')}: expected {least} to 1e9, found {value:g}"
            )
    gpus = probe_driver().gpus
    num_gpus = len(gpus) if args.gpus is None else args.gpus
    smallest = min((gpu.total_bytes for gpu in gpus), default=0)
    gpu_bytes = smallest if args.gpu_memory is None else int(args.gpu_memory * _GB)
    ram_bytes = machine.usable_memory_bytes() if args.ram is None else int(args.ram * _GB)
    numa_nodes = args.numa_nodes or max(1, len(machine.numa_nodes()))
    return _Machine(ram_bytes, num_gpus, gpu_bytes, numa_nodes)


def _placements(config: EngramConfig, node: _Machine) -> list[_Placement]:
    rows = sum(config.num_embeddings)
    table_bytes = rows * _row_bytes(config)
    scale_bytes = rows * _scale_bytes(config)
    num_ranks = max(1, node.num_gpus)
    share = -(-table_bytes // num_ranks)

    def placement(name: str, what: str, ram_bytes: int, gpu_bytes: int) -> _Placement:
        fits = ram_bytes <= node.ram_bytes and gpu_bytes <= node.gpu_bytes
        return _Placement(
            name, what, ram_bytes, gpu_bytes, fits and (node.num_gpus > 0 or not gpu_bytes)
        )

    return [
        placement("host", "RAM, one copy for all ranks", table_bytes, 0),
        placement(
            "host, scales on GPU",
            f"RAM, {_scale_bytes(config)} of {_row_bytes(config)} bytes in each GPU",
            table_bytes - scale_bytes,
            scale_bytes,
        ),
        placement(
            "host, numa gpu", "RAM, a copy on each NUMA node", table_bytes * node.numa_nodes, 0
        ),
        placement(
            "host, memory private",
            f"RAM, {num_ranks} copies, one a rank",
            table_bytes * num_ranks,
            0,
        ),
        placement("device", "every GPU, a copy each", 0, table_bytes),
        placement("device_sharded", "all GPUs together", 0, share),
        placement("disk", "the checkpoint's files", 0, 0),
    ]


def _row_bytes(config: EngramConfig) -> int:
    return packed_row_bytes(config.head_dim)


def _scale_bytes(config: EngramConfig) -> int:
    return num_blocks(config.head_dim)
