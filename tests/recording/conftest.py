"""Rings for the tests of recorded lines and values, and the two forms of their callbacks."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tpcompile.recording import flow as module
from tpcompile.recording import flow_callbacks
from tpcompile.recording.flow import IS_POSSIBLE
from tpcompile.recording.ring import forget_ring


@pytest.fixture
def name() -> Iterator[str]:
    """Of a ring, which is removed after the test."""
    made = secrets.token_hex(8)
    yield made
    forget_ring(made)


@pytest.fixture(params=["in C", "in Python"])
def callbacks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms; before Python 3.12 there is one, and both are that one."""
    if request.param == "in Python":
        monkeypatch.setattr(module, "compiled", lambda: None)
    elif IS_POSSIBLE:
        assert flow_callbacks.compiled() is not None
    return str(request.param)
