"""Where the rows go: a table at the end of the run, and JSON with `--clients-out FILE`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.judge import Row
from tests.clients.table import as_text, summary, write

ROWS = pytest.StashKey[list[Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file of the table."""
    parser.addoption(
        "--clients-out", type=Path, help="write the rows of tests/clients as JSON, over those of earlier calls"
    )


def pytest_configure(config: pytest.Config) -> None:
    """No rows yet."""
    config.stash[ROWS] = []


@pytest.fixture(scope="session")
def record(pytestconfig: pytest.Config) -> Callable[[Row], None]:
    """Keep a row; it is written at once, for a session that is cut short."""
    path = pytestconfig.getoption("--clients-out")

    def keep(row: Row) -> None:
        pytestconfig.stash[ROWS].append(row)
        if path is not None:
            write([row], path)

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    rows = config.stash[ROWS]
    if not rows:
        return
    terminalreporter.section("clients")
    terminalreporter.write_line(as_text(rows))
    terminalreporter.write_line(", ".join(f"{name} {count}" for name, count in summary(rows).items()))
