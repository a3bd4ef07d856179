# SPDX-License-Identifier: Apache-2.0
"""A store of V4.1's columns, data for it and its engine, for modules with pytest_plugins =
"engine_fixtures"."""

import pytest
from engine_cases import build_plan, feed_of
from engines import V4_COLUMNS, small_store

from trtllm_engram.runtime import Tables
from trtllm_engram.runtime.compare import Reference


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("engine"), **V4_COLUMNS, layers=(1, 14))


@pytest.fixture(scope="module")
def feed(store):
    return feed_of(store, 37, 3)


@pytest.fixture(scope="module")
def outputs(store, feed):
    """The reference's."""
    return Reference(store)(feed)


@pytest.fixture(scope="module")
def plan(store):
    return build_plan(store)


@pytest.fixture
def engine(store, plan):
    """The plan, loaded, with its tables bound."""
    from trtllm_engram.runtime.engine import Engine

    with Tables.of_store(store):
        yield Engine(plan)
