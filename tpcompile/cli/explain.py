"""`tpcompile explain CAUSE`: the page of a cause; without one, the list of causes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

_WIDTH = 100
"""Columns of a page on a wider terminal."""


def explain(
    cause: Annotated[
        str, typer.Argument(help="Its name, its phrase in a verdict, or a beginning of one; default: list all.")
    ] = "",
) -> None:
    """Example: tpcompile explain rank-branch

    Explain a cause that a verdict names: what it means, a program that has it, what to do.
    """
    from tpcompile.explain import find, page
    from tpcompile.report.stdout import forgiving, say

    if not cause:
        for line in _listed():
            say(line)
        return
    text = page(find(cause))
    if not sys.stdout.isatty():
        say(text.rstrip("\n"))
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with forgiving():
        console.print(Markdown(text), width=min(console.width, _WIDTH))


def _listed() -> list[str]:
    from tpcompile.explain import groups

    found: list[str] = []
    of_groups = groups()
    width = max(len(cause.slug) for causes in of_groups.values() for cause in causes)
    for heading, causes in of_groups.items():
        found += ["", heading] if found else [heading]
        found += [f"  {cause.slug:<{width}}  {cause.value}" for cause in causes]
    return found
