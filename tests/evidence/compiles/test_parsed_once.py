"""A text of the trace is parsed once, and says the same each time."""

from __future__ import annotations

import pytest

from tpcompile.evidence.compiles.record import parsed
from tpcompile.evidence.text.normalise import GroupRoles


def test_a_text_is_parsed_once_for_equal_roles_and_again_for_different_ones() -> None:
    calls = []

    def parse(text: str, *, roles: GroupRoles, kind: str) -> tuple[str, str, str]:
        calls.append(text)
        return roles(text), roles("other"), kind

    first = [parsed(parse, "7", GroupRoles({}), kind="a") for _ in range(2)]
    assert first == [("group#0", "group#1", "a")] * 2
    assert calls == ["7"]
    assert parsed(parse, "7", GroupRoles({"7": "tp"}), kind="a") == ("tp", "group#0", "a")
    assert parsed(parse, "7", GroupRoles({}), kind="b")[2] == "b"
    assert calls == ["7"] * 3


@pytest.mark.parametrize("times", [1, 2])
def test_a_name_that_was_met_in_a_text_keeps_its_role_in_the_next_one(times: int) -> None:
    def parse(text: str, *, roles: GroupRoles) -> str:
        return roles(text)

    for _ in range(times):
        roles = GroupRoles({})
        assert [parsed(parse, text, roles) for text in ("5", "6", "5")] == ["group#0", "group#1", "group#0"]
