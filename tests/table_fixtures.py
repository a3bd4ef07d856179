# SPDX-License-Identifier: Apache-2.0
"""Nodes for tests, in modules with pytest_plugins = "table_fixtures"."""

import pytest
from table_machine import points_library
from table_ranks import Node


@pytest.fixture(scope="module")
def shared_node():
    """With the library that stops at points, for modules that do not make another."""
    with Node(points_library()) as node:
        yield node


@pytest.fixture(scope="module")
def release_node():
    """With the library as it is installed: a sanitizer uses memory of its own."""
    with Node() as node:
        yield node


@pytest.fixture
def node(shared_node):
    """Left by every test as it was, but for processes of the test, which end here."""
    before = shared_node.look()
    yield shared_node
    shared_node.end_processes()
    shared_node.settles(before)
