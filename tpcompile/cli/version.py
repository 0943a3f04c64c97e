"""`tpcompile version`: versions to put into a bug report."""

from __future__ import annotations

from typing import Annotated

import typer

from tpcompile.report.stdout import say


def _print_and_exit(is_asked: bool) -> None:
    if is_asked:
        say(f"tpcompile {_version_of('tpcompile')}")
        raise typer.Exit


def _version_of(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # of tpcompile: a checkout on the path
        return "not installed"


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

    for name in ("tpcompile", "torch", "triton"):
        say(f"{name} {_version_of(name)}")
    say(f"python {platform.python_version()}")
