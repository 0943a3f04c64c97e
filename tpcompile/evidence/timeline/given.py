"""A branch, and the values that two ranks had set before it -> those that its line reads and that tell the sides apart.

Only values are shown that are small numbers, flags, dtypes, or literals of the program: see `value_text`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache

from tpcompile.evidence.iterables import differ, first
from tpcompile.evidence.timeline import source
from tpcompile.evidence.timeline.flow import texts_of, value_text
from tpcompile.evidence.timeline.values import Scopes
from tpcompile.evidence.timeline.walk import Place, Value, Walks

_SHOWN = 2
"""Values that are told of a branch."""


def texts_of_program(walks: Walks, readable: Collection[str]) -> dict[int, str]:
    """The bits of the literals in the files of the program that may be opened -> their text."""
    texts: dict[int, str] = {}
    for file in sorted({code.file for code in walks.codes} & set(readable)):
        texts |= _texts_of_file(file)
    return texts


@lru_cache(maxsize=256)
def _texts_of_file(file: str) -> Mapping[int, str]:
    return texts_of(source.literals(file), source.named(file))


def values_read(
    walks: Walks, scopes: Scopes, readable: Collection[str], branch: Place, starts: Mapping[int, int]
) -> dict[int, str]:
    """Rank -> `slot = 1, kind = 'drop'`; empty where the values are equal, not known, or may not be shown.

    `starts` has, for one rank of each side, how many steps it had made when the sides parted. Of what the line itself
    sets, such as the next item of a loop, a side has what it took.
    """
    code, line = branch
    file = walks.codes[code].file
    if file not in readable:
        return {}
    known_texts = texts_of_program(walks, readable)
    told: dict[int, list[str]] = {rank: [] for rank in starts}
    for name in sorted(source.read(file, line) | source.assigned(file, line)):
        texts: dict[int, str] = {}
        for rank, start in starts.items():
            value = _newest(walks, scopes, rank, code, name, start)
            is_old = value is not None and value.place == branch and value.known_at < start
            text = value_text(value.known, known_texts, value.near) if value is not None and not is_old else ""
            texts[rank] = f"{value.name} = {text}" if value is not None and text else ""
        is_set_here = name in source.assigned(file, line)
        if differ(texts.values()) and (is_set_here or all(texts.values())):
            for rank, text in texts.items():
                told[rank] += [text] if text else []
    return {rank: ", ".join(found[:_SHOWN]) for rank, found in told.items()}


def _newest(walks: Walks, scopes: Scopes, rank: int, code: int, name: str, start: int) -> Value | None:
    """The value that a rank gave a name last, before it had made `start` steps."""
    return first(
        value
        for value in reversed(walks.values.get(rank, ()))
        if value.known_at <= start and value.name and _is_meant(walks, scopes, value, code, name)
    )


def _is_meant(walks: Walks, scopes: Scopes, value: Value, code: int, name: str) -> bool:
    """True for the same variable, or for an attribute of the same `self`."""
    setter = value.place[0]
    if not name.startswith("."):
        return scopes.of(setter, value.name) == scopes.of(code, name)
    classes = {walks.codes[each].function.rpartition(".")[0] for each in (setter, code)}
    return value.name == f"self{name}" and len(classes) == 1
