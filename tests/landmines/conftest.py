"""One spawn of two ranks and one of four for all landmines that were collected."""

from __future__ import annotations

import sys

import pytest

from tests.landmines.job import Found, run_programs


def _run(request: pytest.FixtureRequest, world_size: int) -> Found:
    names = {item.module.__name__ for item in request.session.items if isinstance(item, pytest.Function)}
    return run_programs(sorted(n for n in names if hasattr(sys.modules[n], "ON_RANKS")), world_size)


@pytest.fixture(scope="session")
def two_ranks(request: pytest.FixtureRequest) -> Found:
    """Program -> its result on each of two ranks."""
    return _run(request, 2)


@pytest.fixture(scope="session")
def four_ranks(request: pytest.FixtureRequest) -> Found:
    """Program -> its result on each of four ranks."""
    return _run(request, 4)
