"""What is typed for a cause -> the cause."""

from __future__ import annotations

import pytest

from tpcompile.errors import ConfigError
from tpcompile.evidence.records.causes import Cause
from tpcompile.explain import find, groups


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("spelled", [lambda one: one.name, lambda one: one.slug, lambda one: one.value.upper()])
def test_the_name_in_any_case_and_the_phrase_are_understood(cause: Cause, spelled: object) -> None:
    assert find(spelled(cause)) == cause  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "cause"),
    [("rank-b", Cause.RANK_BRANCH), ("Rank_Dependent c", Cause.RANK_CONSTANT), ("stuck", Cause.STUCK_COLLECTIVE),
     ("rank was", Cause.KILLED), ("group", Cause.GROUP), ("  shape ", Cause.SHAPE)],
)  # fmt: skip
def test_a_beginning_that_one_cause_has_is_enough(text: str, cause: Cause) -> None:
    assert find(text) == cause


@pytest.mark.parametrize(
    ("text", "named"),
    [("rank", {"rank-branch", "rank-constant", "rank-parametric"}), ("rank brnach", {"rank-branch"}),
     ("autcast", {"autocast"}), ("zzz", set()), ("-", set())],
)  # fmt: skip
def test_any_other_text_is_refused_with_the_names_that_are_close(text: str, named: set[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        find(text)
    says = str(refused.value)
    assert "\n" not in says
    assert named <= {cause.slug for cause in Cause if cause.slug in says}
    assert bool(named) == any(cause.slug in says for cause in Cause)


def test_the_groups_have_each_cause_once_in_its_order() -> None:
    found = groups()
    assert "" not in found
    assert [cause for causes in found.values() for cause in causes] == list(Cause)
