"""Names of process groups in guards, as torch 2.11 and 2.13 print them -> roles; strings of the user's stay."""

from __future__ import annotations

import pytest

from tpcompile.evidence.records import Guard
from tpcompile.evidence.text.guards import parse_guards
from tpcompile.evidence.text.normalise import GroupRoles

# Rank 0 of a 2 x 2 mesh is in the group '1' of the axis ep, rank 1 in '2'; both are in the same group of tp.
ROLES = {"1": {"0": "default_pg", "1": "ep", "3": "tp"}, "2": {"0": "default_pg", "2": "ep", "3": "tp"}}
IS_GROUP = {
    "2.11": "ID_MATCH: ___check_obj_id({}, 140526039225136), type=<torch.distributed.distributed_c10d.ProcessGroup "
    "object at 0x7fcec4a65330>",
    "2.13": "FAKE_SCRIPT_TYPE_MATCH: ___check_fake_script_type({}, 94580028736416), type=<class "
    "'torch.distributed.distributed_c10d.ProcessGroup'>",
}
LOOKED_UP = "  # pg = self.groups[self.name]  # app/model.py:30 in forward"
IN_TORCH = (
    "  # tensor = torch.ops._c10d_functional.all_reduce(  # distributed/_functional_collectives.py:179 in all_reduce"
)
ELSEWHERE = "  # y = x * self.table[self.key]  # app/model.py:40 in forward"


def parse(name: str, *guards: tuple[str, str], issued: frozenset[tuple[str, int, str]] = frozenset()) -> list[Guard]:
    """The guards that a rank in the group `name` has; (source, text) of each, with NAME for that name."""
    tree = ["TREE_GUARD_MANAGER:", "+- RootGuardManager"]
    for source, text in guards:
        tree.append(f"| +- GuardManager: source={source}, accessed_by=DictGetItemGuardAccessor('x'), type=<class 'x'>")
        tree.append(f"| | +- {text}")
    text = "\n".join(tree).replace("NAME", name)
    return list(parse_guards(text, roles=GroupRoles(ROLES[name]), issued=issued))


def are_equal(*guards: tuple[str, str], **options: frozenset[tuple[str, int, str]]) -> bool:
    """True where both ranks have the same guards."""
    return parse("1", *guards, **options) == parse("2", *guards, **options)


def equals(subject: str, value: str = "NAME", at: str = "") -> tuple[str, str]:
    return subject, f"EQUALS_MATCH: {subject} == '{value}'{at}"


@pytest.mark.parametrize("version", ["2.11", "2.13"])
@pytest.mark.parametrize(
    "table", ["L['self'].mesh._pg_registry", "L['self'].sub._root_mesh._pg_registry", "G['GROUPS']", "L['self'].groups"]
)
def test_a_group_in_a_dict_has_its_role_as_key(version: str, table: str) -> None:
    entry = f"{table}['NAME']"
    is_group = (entry, IS_GROUP[version].format(entry))
    assert are_equal(is_group, equals(f"{entry}.group_name"), (entry, f"TYPE_MATCH: ___check_type_id({entry}.x, 7)"))
    assert parse("1", is_group)[0].source == f"{table}[group:ep]"


@pytest.mark.parametrize(
    "guard",
    [
        equals("L['self'].group_name"),
        equals("L['self'].mesh._dim_group_names[0]"),
        equals("L['self'].axis", at=IN_TORCH),
        equals("L['self'].axis", at="  # pg = mesh._pg_registry.get(name)  # distributed/device_mesh.py:84 in _get_pg"),
    ],
)
def test_a_string_is_a_name_where_its_own_name_or_code_of_torch_says_so(guard: tuple[str, str]) -> None:
    assert are_equal(guard)


def test_a_string_is_a_name_on_a_line_that_communicates_in_that_group() -> None:
    guard = equals("L['self'].axis", at=LOOKED_UP)
    assert are_equal(guard, issued=frozenset({("app/model.py", 30, "ep")}))
    assert not are_equal(guard, issued=frozenset({("app/model.py", 30, "tp")}))
    assert not are_equal(guard, issued=frozenset({("app/model.py", 31, "ep")}))


@pytest.mark.parametrize("version", ["2.11", "2.13"])
def test_a_string_is_a_name_on_the_line_that_looks_up_a_group(version: str) -> None:
    table, entry = "L['self'].groups", "L['self'].groups['NAME']"
    looked_up = (table, f"TYPE_MATCH: ___check_type_id({table}, 140255412194976), type=<class 'dict'>{LOOKED_UP}")
    key = (table, f"EQUALS_MATCH: list(dict.keys({table}))[0] == 'NAME'{ELSEWHERE}")
    is_group = (entry, IS_GROUP[version].format(entry))
    assert are_equal(looked_up, key, equals("L['self'].axis", at=LOOKED_UP), is_group)
    assert not are_equal(looked_up, equals("L['self'].axis", at=ELSEWHERE), is_group)


def test_a_string_of_the_users_stays_also_where_it_looks_like_a_name() -> None:
    """Negative control: a dict of numbers keyed by rank + 1, as the groups of the other axis happen to be called."""
    entry = "L['self'].mesh._pg_registry['NAME']"
    is_group = (entry, IS_GROUP["2.13"].format(entry))
    assert not are_equal(is_group, equals("L['self'].key", at=ELSEWHERE))
    number = ("L['self'].table['NAME']", f"EQUALS_MATCH: L['self'].table['NAME'] == 2.0{ELSEWHERE}")
    assert not are_equal(is_group, number)


@pytest.mark.parametrize("version", ["2.11", "2.13"])
def test_groups_under_keys_of_the_users_stay(version: str) -> None:
    """Negative control: keyed by rank, where the key is no group's name, or the name of a different group."""
    for key in ("rank NAME", "NAME"):
        entry = f"L['self'].groups['{key}']"
        is_group = (entry, IS_GROUP[version].format(entry))
        assert not are_equal(is_group, equals(f"{entry}.group_name", "3"))


def test_a_name_that_our_own_wrappers_compare_is_a_name() -> None:
    ours = "  # if isinstance(group, str):  # site-packages/tpcompile/ranks/groups.py:32 in resolve_group"
    source = "L['f'].__closure__[0].cell_contents[0]"
    found = [parse(name, (source, f"EQUALS_MATCH: {source} == 'NAME'{ours}")) for name in ("1", "2")]
    assert found[0][0].expression == found[1][0].expression == f"{source} == group:ep"
