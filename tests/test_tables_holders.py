# SPDX-License-Identifier: Apache-2.0
"""Who holds shared tables: processes found by what they say of themselves, keepers stopped."""

from __future__ import annotations

import json
import time

import pytest
from checkpoints import NOBODY
from table_holders import RECORD, TABLE, holder
from table_machine import needs_root
from waiting import PATIENCE

from trtllm_engram.plugins.errors import EngramError, InputError
from trtllm_engram.runtime.holders import HeldTable, Holder, find_holder, find_holders
from trtllm_engram.runtime.keeper import find_keeper, stop_keeper


def of_tests(pids):
    """Other tests' processes may be there too."""
    return [one for one in find_holders() if one.pid in pids]


def test_a_process_says_what_it_holds():
    with holder() as pid:
        expected = HeldTable("engram_1", "/store", 1, "0" * 32, "memfd", "host", 1000, 250)
        found = find_holder(pid)
        assert found == Holder(pid, "keeper", "mine", 0, 1, 1_700_000_000.0, (expected,), "5eed")
        assert of_tests({pid}) == [found]
    assert find_holder(pid) is None
    assert of_tests({pid}) == []


def test_keepers_come_first_then_ranks():
    second = {"role": "rank", "name": "a", "rank": 1, "size": 2}
    with holder(second) as one, holder({**second, "rank": 0}) as zero, holder() as keeper:
        assert [found.pid for found in of_tests({one, zero, keeper})] == [keeper, zero, one]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        json.dumps(RECORD | {"format_version": 2}),
        json.dumps(RECORD | {"tables": [3]}),
        json.dumps(RECORD | {"tables": [TABLE | {"bytes": "many"}]}),
        json.dumps(RECORD | {"since": None}),
        "[" * 100_000,
    ],
    ids=lambda text: text[:20],
)
def test_a_record_that_cannot_be_read_is_passed_over(text):
    with holder(text) as pid:
        assert find_holder(pid) is None
        find_holders()


@needs_root
def test_another_users_process_is_passed_over():
    """Root may look into it, and must not stop it for a keeper of its own."""
    with holder({"name": "theirs"}, user=NOBODY) as pid:
        assert find_holder(pid) is None
        with pytest.raises(InputError, match="expected 'theirs'"):
            stop_keeper("theirs", 1)


def test_a_process_that_is_gone():
    assert find_holder(2**22 + 1) is None


def test_a_keeper_is_found_by_its_name():
    with holder({"name": "test one"}) as one, holder({"name": "test two"}) as two:
        assert find_keeper("test one").pid == one
        with pytest.raises(InputError, match="expected 'test three' among") as caught:
            find_keeper("test three")
        assert f"'test one' (pid {one}), 'test two' (pid {two})" in str(caught.value)
        with pytest.raises(InputError, match="expected the name of one among"):
            find_keeper(None)


def test_two_keepers_of_one_name():
    """The second one cannot come about but for a socket's path; still neither is ended."""
    with holder({"name": "twin"}) as one, holder({"name": "twin"}) as two:
        with pytest.raises(InputError, match="expected 'twin' once"):
            stop_keeper("twin", 5)
        assert len(of_tests({one, two})) == 2


def test_a_rank_is_no_keeper():
    with holder({"role": "rank", "name": "a rank"}), pytest.raises(InputError):
        find_keeper("a rank")


def test_stop():
    with holder({"name": "to stop"}) as pid:
        assert stop_keeper("to stop", PATIENCE).pid == pid
        assert find_holder(pid) is None


def test_a_keeper_that_does_not_end():
    with holder({"name": "stubborn"}, stubborn=True) as pid:
        started = time.monotonic()
        with pytest.raises(EngramError, match=f"expected the end of pid {pid} within 0.2 s"):
            stop_keeper("stubborn", 0.2)
        assert time.monotonic() - started < PATIENCE
