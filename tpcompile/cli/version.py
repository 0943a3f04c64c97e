"""`tpcompile version`: versions to put into a bug report."""

from __future__ import annotations

from typing import Annotated

import typer

from tpcompile.report.stdout import say
from tpcompile.version import __version__, installed


def _print_and_exit(is_asked: bool) -> None:
    if is_asked:
        say(f"tpcompile {__version__}")
        raise typer.Exit


def option(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_and_exit, help="Print the version and exit."),
    ] = False,
) -> None:
    """Prove that torch.compile gave every tensor-parallel rank the same one graph."""


def version() -> None:
    """Print the versions of tpcompile, Python, torch and triton (read from metadata, torch is not imported)."""
    import platform

    say(f"tpcompile {__version__}")
    for name in ("torch", "triton"):
        say(f"{name} {installed(name) or 'not installed'}")
    say(f"python {platform.python_version()}")
