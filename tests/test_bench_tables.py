# SPDX-License-Identifier: Apache-2.0
"""What `bench tables` says of the memory that ranks have in use, by a small table."""

import pytest

from trtllm_engram.runtime.bench import tables

TABLE_BYTES = 8 << 20  # about


@pytest.mark.parametrize("memory", ["memfd", "private"])
def test_memory_of_ranks(memory):
    """All of the table is seen, once where ranks share it, and as often as it is there else."""
    with tables.made_up_store(TABLE_BYTES) as store:
        (figure,) = tables.bench_memory(store, 3, memory)
    assert figure.limit == pytest.approx(TABLE_BYTES, rel=0.1)
    copies = 3 if memory == "private" else 1
    assert figure.share == pytest.approx(copies, abs=0.02 * copies)
    assert figure.met == (copies == 1)


def test_memory_that_is_not_seen_whole(monkeypatch):
    """A share that is too small is no success: something was not measured."""
    monkeypatch.setattr(tables.Rank, "ask", lambda *_: {"pss_bytes": TABLE_BYTES // 6})
    with tables.made_up_store(TABLE_BYTES) as store:
        (figure,) = tables.bench_memory(store, 3, "memfd")
    assert 0.4 < figure.share < 0.6
    assert figure.met is False
