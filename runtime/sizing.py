# SPDX-License-Identifier: Apache-2.0
"""Bytes, load times and lookup rates of a model's tables, by placement, on nodes of some kind.

A node is the unit: its ranks share a copy, or hold a part each, and nothing of a table is read from
another node. So every node of several needs what one needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_engram.builder import EngramConfig

from .row import num_blocks, packed_row_bytes

# Rows a second that one H200 looks up with thousands of tokens in a call, ids uniform
# (docs/scaling.md says how they were measured).
DEVICE_ROWS_PER_S = 3.78e9  # in its own memory
PEER_ROWS_PER_S = 1.25e9  # in another GPU's, over NVLink
# In host memory over PCIe 5, their scales in its own, without CPU threads: their number differs.
HOST_ROWS_PER_S = 43.5e6
_HOT_BYTES = 1 << 30  # of a layer on disk: rows that were read before, as hot_gib is by default


@dataclass(frozen=True)
class Nodes:
    """Nodes of one kind."""

    num_nodes: int
    ram_bytes: int  # of each node
    num_gpus: int  # of each node
    gpu_bytes: int  # of each GPU
    numa_nodes: int  # of each node
    disk_bytes_per_s: float  # that a node reads the checkpoint at


@dataclass(frozen=True)
class Placement:
    """What one placement of all tables needs of every node, and what it gives.

    load_seconds: reading the files, which no memory's speed limits; 0 where none are read.
    tokens_per_s: of one GPU, through all layers, if it did nothing else; None: not measured.
    """

    name: str
    what: str
    ram_bytes: int
    gpu_bytes: int  # of each GPU
    fits: bool
    load_seconds: float
    tokens_per_s: float | None


def placements(config: EngramConfig, nodes: Nodes) -> list[Placement]:
    """Every placement, from the one that most nodes want."""
    rows = sum(config.num_embeddings)
    row_bytes, scale_bytes = packed_row_bytes(config.head_dim), num_blocks(config.head_dim)
    table_bytes = rows * row_bytes
    num_ranks = max(1, nodes.num_gpus)
    share = -(-table_bytes // num_ranks)
    hot_bytes = sum(min(_HOT_BYTES, layer * row_bytes) for layer in config.num_embeddings)
    rows_per_token = config.num_layers * config.num_columns

    def placement(
        name: str,
        what: str,
        ram_bytes: int,
        gpu_bytes: int,
        rows_per_s: float | None,
        read_bytes: int = table_bytes,
    ) -> Placement:
        fits = ram_bytes <= nodes.ram_bytes and gpu_bytes <= nodes.gpu_bytes
        measured = rows_per_s is not None and nodes.num_gpus > 0
        return Placement(
            name=name,
            what=what,
            ram_bytes=ram_bytes,
            gpu_bytes=gpu_bytes,
            fits=fits and (nodes.num_gpus > 0 or not gpu_bytes),
            load_seconds=read_bytes / nodes.disk_bytes_per_s,
            tokens_per_s=rows_per_s / rows_per_token if measured and rows_per_s else None,
        )

    return [
        placement("host", "RAM, one copy for all ranks", table_bytes, 0, None),
        placement(
            "host, scales on GPU",
            f"RAM, {scale_bytes} of {row_bytes} bytes in each GPU",
            table_bytes - rows * scale_bytes,
            rows * scale_bytes,
            HOST_ROWS_PER_S,
        ),
        placement(
            "host, numa gpu",
            "RAM, a copy on each NUMA node",
            table_bytes * nodes.numa_nodes,
            0,
            None,
        ),
        placement(
            "host, memory private",
            "RAM, a copy for each rank",
            table_bytes * num_ranks,
            0,
            None,
        ),
        placement("device", "every GPU, a copy each", 0, table_bytes, DEVICE_ROWS_PER_S),
        placement(
            "device_sharded", "all GPUs of a node together", 0, share, sharded_rows_per_s(num_ranks)
        ),
        placement("disk", "files; hot rows in RAM", hot_bytes, 0, None, 0),
        placement(
            "disk, scales in RAM",
            "the same, and scales in RAM",
            hot_bytes + rows * scale_bytes,
            0,
            None,
            rows * scale_bytes,
        ),
    ]


def sharded_rows_per_s(num_ranks: int) -> float:
    """Of rows that lie in all ranks' GPUs alike, read one part after the other."""
    return num_ranks / (1 / DEVICE_ROWS_PER_S + (num_ranks - 1) / PEER_ROWS_PER_S)
