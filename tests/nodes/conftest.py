"""Nodes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.machines import Nodes, two_nodes, why_not


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Two nodes, in which nothing runs at the end; the test is skipped where none can be made."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with two_nodes(tmp_path) as made:
        yield made
