"""evidence/timeline: a text that differs only as the number of the rank does is no reason; a different one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from tests.evidence.timeline import own_numbers, programs
from tests.evidence.timeline.test_part import flow_of
from tests.evidence.timeline.test_values import marked
from tpcompile.evidence.records.findings import Parted
from tpcompile.evidence.timeline.before import unlike_before
from tpcompile.evidence.timeline.flow import Flow, Set, without_own
from tpcompile.evidence.timeline.part import parted
from tpcompile.evidence.timeline.walk import Walks

FILES = {programs.__file__, own_numbers.__file__}


@pytest.fixture
def found_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None], int], Parted | None]:
    """Each rank with the number that torchrun gives it."""

    def flows(program: Callable[[int], None], num_ranks: int) -> Mapping[int, Flow]:
        found = {}
        for rank in range(num_ranks):
            monkeypatch.setenv("RANK", str(rank))
            found[rank] = flow_of(program, rank)
        return found

    return lambda program, num_ranks: parted(flows(program, num_ranks), FILES)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_files_of_a_ranks_own_are_no_reason(found_of: Callable[..., Parted | None], num_ranks: int) -> None:
    assert found_of(own_numbers.keeps_files_of_its_own, num_ranks) is None


def test_without_the_numbers_of_the_rank_they_would_be(
    found_of: Callable[..., Parted | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(Walks, "own", frozenset())
    found = found_of(own_numbers.keeps_files_of_its_own, 2)
    assert found is not None
    assert found.line.line == marked(own_numbers.keeps_files_of_its_own)


@pytest.mark.parametrize("program", [own_numbers.reads_another_version, own_numbers.reads_another_file])
def test_what_another_rank_has_without_its_number_is_a_reason(
    found_of: Callable[..., Parted | None], program: Callable[[int], None]
) -> None:
    """`v1` on rank 1 is not its number where ranks 2 and 3 read `v0`; nor does one excuse the letters beside it."""
    found = found_of(program, 4)
    assert found is not None
    assert found.line.line == marked(program)
    assert found.odd == ((1,) if program is own_numbers.reads_another_version else ())


def test_numbers_are_whole() -> None:
    assert without_own("cuda:1 v10 step_001", {1}) == "cuda:\0 v10 step_\0"


def unlike(*texts: tuple[str, str]) -> bool:
    """True where texts, each with itself without the numbers of its rank, are a difference before the recording."""
    flows = {
        rank: Flow(before=(Set(file="m.py", function="main", line=3, name="path", value=value, own=own),))
        for rank, (value, own) in enumerate(texts)
    }
    return bool(unlike_before(flows, []))


def test_what_was_set_before_is_compared_alike() -> None:
    assert not unlike(("text a", "text #"), ("text b", "text #"))
    assert not unlike(("text v1", ""), ("text v1", "text v#")), "equal, though it has the number of one of them"
    assert unlike(("text a", ""), ("text b", "text #"))
    assert unlike(("text a", "text #"), ("text b", "text x#"))
