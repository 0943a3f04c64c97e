"""evidence/timeline/before: what ranks had set differently before the first step, where it is the reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.evidence.timeline import programs
from tests.evidence.timeline.test_part import flow_of
from tpcompile.evidence.timeline.before import unlike_before
from tpcompile.evidence.timeline.conclude import side_text
from tpcompile.evidence.timeline.flow import Code, Flow, Set
from tpcompile.evidence.timeline.part import parted


def with_setting(rank: int, width: int) -> Flow:
    """The rank runs `for _ in range(5): collective(width)`; the width was set before."""

    def program(_: int) -> None:
        programs.a_width_is_used(width)

    return flow_of(program, rank)


def flows_of(widths: Mapping[int, int]) -> dict[int, Flow]:
    return {rank: with_setting(rank, width) for rank, width in widths.items()}


@pytest.mark.parametrize(("widths", "odd"), [((8, 16), ()), ((8, 16, 8), (1,))])
def test_a_setting_of_one_rank_is_the_reason(widths: tuple[int, ...], odd: tuple[int, ...]) -> None:
    found = parted(flows_of(dict(enumerate(widths))), {programs.__file__, __file__}, ["width"])
    assert found is not None
    assert found.odd == odd
    assert [side.value for side in found.sides] == ["sets width = 8", "sets width = 16"]
    assert (Path(found.line.file).name, found.line.function) == (Path(__file__).name, "with_setting")
    assert "sets width = 16" in side_text(found.sides[1])


def test_ranks_of_different_domains_have_settings_of_their_own() -> None:
    files = {programs.__file__, __file__}
    assert parted(flows_of({0: 8, 1: 16}), files, ["width"], is_same_program=False) is None


def test_a_setting_that_is_equal_is_none() -> None:
    assert parted(flows_of({0: 8, 1: 8}), {programs.__file__, __file__}, ["width"]) is None


def unlike(*values: str, name: str = "width", function: str = "main") -> list[frozenset[str]]:
    flows = {
        rank: Flow(before=(Set(file="m.py", function=function, line=3, name=name, value=value),))
        for rank, value in enumerate(values)
    }
    return [one.names for one in unlike_before(flows, [Code(file="m.py", function="main", line=1)])]


def test_what_each_rank_has_of_its_own_is_its_role() -> None:
    assert unlike("0", "1") == []
    assert unlike("1234", "1235") == []
    assert unlike("text a", "text b", "text c") == []
    assert unlike("0", "0", "1") != []
    assert unlike("4", "6") != []
    assert unlike("True", "False") != []


def test_names_are_those_of_the_program() -> None:
    assert unlike("4", "6") == [{"0 width"}]
    assert unlike("4", "6", name="config.width") == [{".width"}]
    assert unlike("4", "6", function="<module>") == [{"width", ".width"}]
    assert unlike("4", "6", function="unseen") == [{"width"}]


def test_without_steps_a_name_that_a_guard_has_is_found() -> None:
    flows = {
        rank: Flow(before=(Set(file="m.py", function="Net.__init__", line=3, name="net.scale", value=value),))
        for rank, value in enumerate(("1.0", "1.5", "1.0"))
    }
    found = parted(flows, (), ["self", "scale"])
    assert found is not None
    assert (found.line.line, found.odd, found.is_uneven) == (3, (1,), False)
    assert parted(flows, (), ["self", "bias"]) is None
