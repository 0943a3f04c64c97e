"""stdout or stderr -> a console that is a terminal only where the stream is one, also in a CI that sets FORCE_COLOR."""

from __future__ import annotations

import sys

from rich.console import Console


def stdout() -> Console:
    """The console of what a command reports."""
    return Console(force_terminal=sys.stdout.isatty())


def stderr() -> Console:
    """The console of progress and problems."""
    return Console(stderr=True, force_terminal=sys.stderr.isatty())
