# SPDX-License-Identifier: Apache-2.0
"""Which processes of a node share their tables.

    Tables()                                    # as the launcher's variables say, else alone
    Tables(Group("serving", rank=2, size=8))    # by hand: the same name and size everywhere
    Tables(Group.of_torch())                    # the ranks of torch.distributed on this node
    Tables(Group.of_mpi(MPI.COMM_WORLD))        # those of a communicator of mpi4py

torch and mpi4py are only asked who is there; ranks then meet on a Unix socket of their own.
"""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_engram.plugins.errors import InputError

from . import _native
from .machine import ROOT, read_text


@dataclass(frozen=True)
class Group:
    """A rank's place among the processes of one node that bind the same tables at the same time.

    Args:
        name: what the group is called; groups of one user on one node need different names.
        rank: this process's number, 0 to size - 1.
        size: processes in the group.
        socket: a path for the socket on which the ranks meet, in a folder that they all see; for
            containers with separate network namespaces. Default: a name without a file.
        timeout_s: how long ranks wait for each other; default 120.
        assume_ram: bytes of memory to be had, where MemAvailable does not know; the least that any
            rank says counts.
        keeper: the process of `tables serve` to attach to, for memory = "keeper": its name or its
            socket's path; default: any of this user's that has the table.

    What is None is as the launcher's variables say (OMPI_COMM_WORLD_LOCAL_RANK, SLURM_LOCALID,
    LOCAL_RANK, MPI_LOCALRANKID and their sizes), else this process is alone.
    """

    name: str | None = None
    rank: int | None = None
    size: int | None = None
    socket: str | os.PathLike[str] | None = None
    timeout_s: float | None = None
    assume_ram: int | None = None
    keeper: str | None = None

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.size is None):
            raise InputError(
                f"group: expected rank and size, or neither, found rank {self.rank} and size "
                f"{self.size}"
            )
        if self.rank is None or self.size is None:
            return
        if self.size < 1:
            raise InputError(f"group: size: expected at least 1, found {self.size}")
        if not 0 <= self.rank < self.size:
            raise InputError(f"group: rank: expected 0 to {self.size - 1}, found {self.rank}")

    @classmethod
    def of_torch(cls, process_group: Any = None, **others: Any) -> Group:
        """The ranks of a torch.distributed process group (default: all) that run on this node.

        All ranks of the process group call this together. `others` are arguments of Group.
        """
        dist = importlib.import_module("torch.distributed")
        everyone: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(everyone, _identity(), group=process_group)
        return cls._of_node(everyone, dist.get_rank(process_group), others)

    @classmethod
    def of_mpi(cls, communicator: Any, **others: Any) -> Group:
        """The ranks of a communicator of mpi4py that run on this node, with the rules of
        of_torch."""
        everyone = communicator.allgather(_identity())
        return cls._of_node(everyone, communicator.Get_rank(), others)

    @classmethod
    def _of_node(
        cls, everyone: Sequence[tuple[str, str]], rank: int, others: dict[str, Any]
    ) -> Group:
        node = everyone[rank][0]
        on_node = [index for index, (other, _) in enumerate(everyone) if other == node]
        first = on_node[0]
        return cls(everyone[first][1], on_node.index(rank), len(on_node), **others)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all where one speaks."""
        return (_native.launcher_rank() if self.rank is None else self.rank) == 0

    def keys(self) -> dict[str, Any]:
        """The keys of [group]."""
        keys = {name: value for name, value in vars(self).items() if value is not None}
        if self.socket is not None:
            keys["socket"] = str(Path(self.socket).absolute())
        if self.timeout_s is not None:
            keys["timeout_s"] = float(self.timeout_s)
        return keys


def _identity(root: Path = ROOT) -> tuple[str, str]:
    """(this node, a name that no other group has): containers of one machine are one node."""
    boot_id = read_text(root / "proc/sys/kernel/random/boot_id")
    return boot_id or os.uname().nodename, secrets.token_hex(8)
