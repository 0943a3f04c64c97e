"""One pair of ranks and one set of four for the known bugs of a module."""

from __future__ import annotations

import pytest

from tests.known_tp_bugs.job import Found, run_programs


def _run(request: pytest.FixtureRequest, world_size: int) -> Found:
    return run_programs(request.module.__name__, world_size)


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest) -> Found:
    """Program -> its result on each of two ranks."""
    return _run(request, 2)


@pytest.fixture(scope="module")
def four_ranks(request: pytest.FixtureRequest) -> Found:
    """Program -> its result on each of four ranks."""
    return _run(request, 4)
