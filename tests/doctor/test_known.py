"""Known bad versions: the data file, and which versions an entry is about."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tpcompile.doctor import known
from tpcompile.doctor.finding import Level

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("version", "is_bad"),
    [("2.10.1", False), ("2.11.0", True), ("2.12", True), ("2.13.1+cu130", True), ("2.14.0", False), ("3.0", False)],
)
def test_an_entry_is_about_every_patch_release_from_its_first_version_to_its_last(version: str, is_bad: bool) -> None:
    entry = known.Problem(package="torch", since="2.11", through="2.13", what="w", todo="t", source="s")
    assert entry.has(version) == is_bad


def test_a_bad_version_is_a_warning_with_source_and_what_to_do() -> None:
    found = known.known({"megatron-core": "0.16.1"})
    assert [(one.level, "megatron" in one.says, bool(one.todo)) for one in found] == [(Level.WARN, True, True)]


def test_versions_without_a_known_problem_are_fine() -> None:
    assert [one.level for one in known.known({"torch": "2.99.0", "transformers": "4.0"})] == [Level.OK]


def test_every_source_is_a_public_thread_or_a_file_of_this_repository() -> None:
    for entry in known.problems():
        for source in entry.source.split(", "):
            assert re.fullmatch(r"[\w.-]+#\d+", source) or (ROOT / source).is_file(), source


def test_the_versions_are_those_that_the_program_of_an_entry_names() -> None:
    for entry in known.problems():
        for source in re.findall(r"repro/\w+\.py", entry.source):
            text = (ROOT / source).read_text()
            assert re.search(rf"\b{re.escape(entry.through)}\b", text), f"{source} was not seen with {entry.through}"
