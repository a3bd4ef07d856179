# SPDX-License-Identifier: Apache-2.0
"""What processes have in memory, by /proc."""

from __future__ import annotations

import re
from pathlib import Path

# Names of mappings: a memfd's, and that of a file of /dev/shm that never had one.
_TABLES = re.compile(r"trtllm-engram|/#\d+ \(deleted\)$")


def table_memory(pid: int) -> dict[str, int]:
    """Bytes that a process maps of each piece of tables' memory, by its inode. (Its PSS would not
    do: the kernel takes pages out of page tables when it makes huge ones.)"""
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, _, _, _, inode, *name = line.split(maxsplit=5)
        if name and _TABLES.search(name[0]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            found[inode] = found.get(inode, 0) + end - begin
    return found


def writable_tables(pid: int) -> list[str]:
    """The mappings of tables' memory that a process may write to."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if _TABLES.search(line) and line.split()[1][1::2] == "ws"]


def own_bytes(pid: int) -> int:
    """Of memory that is of no file and shared with nobody."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)[1])
