# SPDX-License-Identifier: Apache-2.0
"""The node of a test, for modules with pytest_plugins = "table_fixtures" and a shared_node."""

import pytest


@pytest.fixture
def node(shared_node):
    """Left by every test as it was, but for processes of the test, which end here."""
    before = shared_node.look()
    yield shared_node
    shared_node.end_processes()
    shared_node.settles(before)
