"""Healthy clients are quiet on both routes, and their faults are found; whether they are named is recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.case import Client, Fault
from tests.clients.clients import CLIENTS
from tests.clients.judge import Row, judged
from tests.clients.launch import run
from tests.clients.watched import CHECK, SENTINEL, UNEDITED

LIMIT_S = 240.0
pytestmark = pytest.mark.timeout(LIMIT_S + 60)

OF_RUN = ("titan", "trainer", "ddp")
"""Clients that `tpcompile run` watches as well."""
FAULTS = [(client, fault) for client in CLIENTS for fault in client.faults]


def _has(client: Client, route: str) -> bool:
    return route != UNEDITED or client.folder in OF_RUN


def played(client: Client, fault: Fault | None, route: str, folder: Path, record: Callable[[Row], None]) -> Row:
    """Run a client once and record how it was judged."""
    outcome = run(client, fault.name if fault else "", route, folder, limit_s=LIMIT_S)
    row = judged(client, fault, route, outcome)
    record(row)
    print(outcome.text)  # pytest shows it where the test fails
    return row


@pytest.mark.parametrize(
    ("client", "route"),
    [(client, route) for client in CLIENTS for route in (SENTINEL, CHECK, UNEDITED) if _has(client, route)],
    ids=lambda case: getattr(case, "folder", case),
)
def test_a_healthy_client_is_quiet(client: Client, route: str, tmp_path: Path, record: Callable[[Row], None]) -> None:
    row = played(client, None, route, tmp_path, record)
    assert (row.exit_code, row.says) == (0, "")


@pytest.mark.parametrize(
    ("client", "fault", "route"),
    [(*case, route) for case in FAULTS for route in (SENTINEL, UNEDITED) if _has(case[0], route)],
    ids=lambda case: getattr(case, "folder", None) or getattr(case, "name", case),
)
def test_a_fault_of_a_client_stops_its_job(
    client: Client, fault: Fault, route: str, tmp_path: Path, record: Callable[[Row], None]
) -> None:
    row = played(client, fault, route, tmp_path, record)
    assert row.found, row
