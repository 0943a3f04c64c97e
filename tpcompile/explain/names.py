"""What a user types for a cause -> the cause, and its page; all causes in groups."""

from __future__ import annotations

import difflib
from importlib import resources

from tpcompile.errors import ConfigError
from tpcompile.evidence.records.causes import Cause

_MAX_MATCHES = 4
_FIRST = {
    Cause.RANK_BRANCH: "The traced program",
    Cause.SHAPE: "Inputs of the compiled region",
    Cause.AUTOCAST: "State of the process",
    Cause.AUTOTUNE: "Lowering",
    Cause.REDUCE_OP: "Collectives",
    Cause.ENVIRONMENT: "Around the program",
    Cause.CACHE_SPLIT: "Listed and green",
    Cause.PARTED: "What the ranks executed",
}
"""First cause of a group, in the order of `Cause` -> its heading."""


def groups() -> dict[str, list[Cause]]:
    """Heading -> the causes under it, in the order of `Cause`."""
    found: dict[str, list[Cause]] = {}
    heading = ""
    for cause in Cause:
        heading = _FIRST.get(cause, heading)
        found.setdefault(heading, []).append(cause)
    return found


def find(text: str) -> Cause:
    """The cause that is meant: its name in any case, its phrase, or a beginning of either that only one cause has.

    Names come before phrases. Raises ConfigError, with close matches, for any other text.
    """
    wanted = _normal(text)
    names = {_normal(cause.slug): cause for cause in Cause}
    phrases = {_normal(cause.value): cause for cause in Cause}
    found = {**phrases, **names}.get(wanted)
    if found is not None:
        return found
    begun: list[Cause] = []
    for known in (names, phrases):
        begun = begun or [cause for spelling, cause in known.items() if wanted and spelling.startswith(wanted)]
    if len(begun) == 1:
        return begun[0]
    problem = "several causes begin with" if begun else "no cause is called"
    spellings = {**phrases, **names}
    close = difflib.get_close_matches(wanted, list(spellings), n=_MAX_MATCHES, cutoff=0.5)
    matches = begun or list(dict.fromkeys(spellings[match] for match in close))
    listed = f": {', '.join(cause.slug for cause in matches)}" if matches else ""
    raise ConfigError(f"{problem} {text!r}{listed}; `tpcompile explain` lists all")


def _normal(text: str) -> str:
    return " ".join(text.lower().replace("_", " ").replace("-", " ").split())


def page(cause: Cause) -> str:
    """The page, as it is installed with the package."""
    file = resources.files("tpcompile.explain") / "causes" / f"{cause.slug}.md"
    return file.read_text(encoding="utf-8")
