"""One run of one client, with all that it prints: python -m tests.clients FOLDER [FAULT or ""] [sentinel | check]."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp

from tests.clients.clients import CLIENTS
from tests.clients.judge import judged
from tests.clients.launch import run
from tests.clients.watched import SENTINEL


def main(folder: str, fault: str = "", route: str = SENTINEL) -> None:
    """Run it, print its output and how it is judged."""
    client = next(client for client in CLIENTS if client.folder == folder)
    planted = next((known for known in client.faults if known.name == fault), None)
    outcome = run(client, fault, route, Path(mkdtemp(prefix="client-")), limit_s=200.0)
    print(outcome.text)
    print(judged(client, planted, route, outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
