"""The pages of `tpcompile explain`: one for each cause, with its advice word for word."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from tpcompile.evidence.records.causes import ADVICE, Cause
from tpcompile.explain import page

HEADINGS = ["In a job", "A program that has it|How it comes about", "What to do"]


def problems(cause: Cause, text: str) -> list[str]:
    """What a page lacks."""
    found = [] if text.startswith(f"# {cause.value}\n\n") else ["the phrase of the cause is not its title"]
    headings = re.findall(r"^## (.*)$", text, re.M)
    if not all(re.fullmatch(*pair) for pair in zip(HEADINGS, headings, strict=True)):
        found.append(f"headings: {headings}")
    todo = text.partition("\n## What to do\n\n")[2]
    advice = ADVICE.get(cause, ())
    if advice and not todo.startswith(f"{advice[0]}\n"):
        found.append("the first advice is not the first line of what to do")
    return found + [f"not there: {sentence}" for sentence in advice if f"\n{sentence}\n" not in f"\n{todo}"]


@pytest.mark.parametrize("cause", Cause)
def test_a_page_has_what_it_must(cause: Cause) -> None:
    assert problems(cause, page(cause)) == []
    if cause.note:
        assert cause.note in " ".join(page(cause).split())


def test_an_advice_that_was_changed_in_one_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADVICE, Cause.STRIDE, ("Call `.clone()` before the compiled region, on all ranks.",))
    assert len(problems(Cause.STRIDE, page(Cause.STRIDE))) == 2


def test_no_page_is_of_no_cause() -> None:
    folder = resources.files("tpcompile.explain") / "causes"
    assert {Path(file.name).stem for file in folder.iterdir()} == {cause.slug for cause in Cause}
