"""Installed versions -> the known problems that they have, from known.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources

from pydantic import BaseModel, ConfigDict

from tpcompile import version
from tpcompile.doctor.finding import Finding, warn


class Problem(BaseModel):
    """An entry of known.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    package: str
    since: str
    """First version that it was seen with."""
    through: str
    """Last version that it was seen with; `2.13` is every patch release of it."""
    what: str
    todo: str
    source: str
    """A public thread, or a program of this repository that shows it."""

    def has(self, version: str) -> bool:
        """Whether this version is one of them."""
        number = _number(version)
        return _number(self.since) <= number and number[: len(_number(self.through))] <= _number(self.through)


def problems() -> list[Problem]:
    """All that are known."""
    text = (resources.files("tpcompile.doctor") / "known.toml").read_text(encoding="utf-8")
    return [Problem(**entry) for entry in tomllib.loads(text)["problem"]]


def installed(names: Sequence[str]) -> dict[str, str]:
    """Package -> its version, of those that are installed."""
    versions = {name: version.installed(name) for name in names}
    return {name: found for name, found in versions.items() if found}


def known(versions: Mapping[str, str] | None = None) -> list[Finding]:
    """One finding for each problem that an installed package has."""
    entries = problems()
    if versions is None:
        versions = installed([entry.package for entry in entries])
    found = [entry for entry in entries if entry.package in versions and entry.has(versions[entry.package])]
    if not found:
        return [Finding(name="known problems", says="none of these versions")]
    return [
        warn("known problem", f"{entry.package} {versions[entry.package]}: {entry.what} ({entry.source})", entry.todo)
        for entry in found
    ]


def _number(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))
