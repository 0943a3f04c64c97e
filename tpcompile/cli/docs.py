"""`tpcompile docs [NAME]`: where the pages of the documentation are; they are installed with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpcompile.errors import ConfigError
from tpcompile.report.stdout import say

_PACKAGE = Path(__file__).resolve().parents[1]


def docs(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="A page, as `tpcompile docs` lists it.")] = "",
) -> None:
    """Print where the pages of the documentation are: all of them with their names, or one.

    Example: tpcompile docs gate
    """
    found = pages()
    if name:
        for page in _named(name, found):
            say(page.as_uri())
        return
    width = max(map(len, found))
    for known, page in found.items():
        say(f"{known:{width}}  {page.as_uri()}")


def pages() -> dict[str, Path]:
    """Name -> file, from the installed package or the repository. Raises ConfigError where there are none."""
    for folder in (_PACKAGE / "docs", _PACKAGE.parent / "docs"):
        files = sorted(folder.rglob("*.md"))
        if files:
            return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}
    raise ConfigError(f"no pages are installed with this package: neither in {_PACKAGE} nor beside it")


def _named(name: str, found: dict[str, Path]) -> list[Path]:
    """The page of that name, else those whose name ends in it. Raises ConfigError where there is none."""
    wanted = name.removesuffix(".md").removeprefix("docs/")
    if wanted in found:
        return [found[wanted]]
    ending = [page for known, page in found.items() if known.endswith(f"/{wanted}")]
    if not ending:
        raise ConfigError(f"there is no page {name}; choose from {', '.join(found)}")
    return ending
