"""Guard text as torch 2.11 and 2.13 print it -> guards; lines below are shortened from real traces."""

from __future__ import annotations

import pytest

from tpcompile.evidence.records import Guard
from tpcompile.evidence.text.comments import split_comments
from tpcompile.evidence.text.guards import parse_guards
from tpcompile.evidence.text.normalise import GroupRoles

AT = "  # if s.flag: y=x*s.w  # app/model.py:31 in forward"


def parse(*lines: str, source: str = "G['x']", roles: dict[str, str] | None = None, files: tuple[str, ...] = ()):
    """Guards of a tree with one manager for `source` and these guard lines below it."""
    tree = ["", "TREE_GUARD_MANAGER:", "+- RootGuardManager"]
    manager = (
        "GuardManager: source={}, accessed_by=DictGetItemGuardAccessor('x'), type=<class 'int'>, tag_safe=(True, False)"
    )
    tree += [f"| +- {manager.format(source)}", *(f"| | +- {line}" for line in lines), "", "Guard latency = 97.28 us"]
    return parse_guards("\n".join(tree), roles=GroupRoles(roles or {}), files=files)


def one(line: str, **kwargs) -> Guard:
    """The one guard of a line."""
    guards = parse(line, **kwargs)
    assert len(guards) == 1
    return guards[0]


def test_a_guard_has_type_source_expression_and_the_users_line() -> None:
    guard = one(f"TRUE_MATCH: L['s'].flag == True{AT}", source="L['s'].flag")
    assert (guard.type, guard.source, guard.expression) == ("TRUE_MATCH", "L['s'].flag", "L['s'].flag == True")
    assert guard.line is not None
    assert (str(guard.line), guard.line.code) == ("app/model.py:31 in forward", "if s.flag: y=x*s.w")


def test_managers_and_the_latency_line_are_not_guards() -> None:
    assert [g.type for g in parse(f"TRUE_MATCH: L['s'].flag == True{AT}")] == ["TRUE_MATCH"]


def test_the_source_is_the_nearest_manager_above() -> None:
    guards = parse_guards(
        "+- RootGuardManager\n"
        "| +- GuardManager: source=L['a'], accessed_by=X, type=<class 'int'>\n"
        "| | +- GuardManager: source=L['a'].b, accessed_by=X, type=<class 'int'>\n"
        "| | | +- EQUALS_MATCH: L['a'].b == 1\n"
        "| | +- TYPE_MATCH: ___check_type_id(L['a'], 123456), type=<class 'int'>\n"
        "| +- GuardManager: source=L['c'], accessed_by=X, type=<class 'int'>\n"
        "| | +- EQUALS_MATCH: L['c'] == 2\n",
        roles=GroupRoles({}),
    )
    assert [g.source for g in guards] == ["L['a'].b", "L['a']", "L['c']"]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        # 2.13
        ("ID_MATCH: ___check_obj_id(G['AR'], 94577141758704), type=<class '__main__.AR'>",
         "ID_MATCH: ___check_obj_id(G['AR'], 140618256980944), type=<class '__main__.AR'>"),
        ("TYPE_MATCH: ___check_type_id(L['s'], 94577141762224), type=<class '__main__.Flag'>",
         "TYPE_MATCH: ___check_type_id(L['s'], 7), type=<class '__main__.Flag'>"),
        ("ID_MATCH: ___check_fake_script_type(L['s'], 94577141762224), type=<class 'ProcessGroup'>",
         "ID_MATCH: ___check_fake_script_type(L['s'], 94577141762225), type=<class 'ProcessGroup'>"),
        # 2.11 prints repr of the object
        ("ID_MATCH: ___check_obj_id(f.__code__, 94), type=<code object f at 0x55d68b614c10, file \"/a.py\", line 18>",
         "ID_MATCH: ___check_obj_id(f.__code__, 95), type=<code object f at 0x7f2df2ee1ca0, file \"/b.py\", line 20>"),
        ("ID_MATCH: ___check_obj_id(G['g'], 94), type=<torch.distributed.ProcessGroup object at 0x7f1>",
         "ID_MATCH: ___check_obj_id(G['g'], 95), type=<torch.distributed.ProcessGroup object at 0x7f2>"),
        ("ID_MATCH: ___check_obj_id(G['torch'], 94), type=<module 'torch' from '/a/torch/__init__.py'>",
         "ID_MATCH: ___check_obj_id(G['torch'], 95), type=<module 'torch' from '/b/torch/__init__.py'>"),
        ("ID_MATCH: ___check_obj_id(G['z'], 94), type=<built-in method zeros of type object at 0x7fca9d8e9fa0>",
         "ID_MATCH: ___check_obj_id(G['z'], 95), type=<built-in method zeros of type object at 0x7f0000000fa0>"),
        ("ID_MATCH: ___check_obj_id(G['p'], 140510380201024), type=functools.partial(<built-in function max>, 1, 2)",
         "ID_MATCH: ___check_obj_id(G['p'], 140510380201999), type=functools.partial(<built-in function max>, 1, 2)"),
        # both
        ("TENSOR_MATCH: check_tensor(L['x'], Tensor, DispatchKeySet(CUDA), torch.float32, device=0, size=[4])",
         "TENSOR_MATCH: check_tensor(L['x'], Tensor, DispatchKeySet(CUDA), torch.float32, device=7, size=[4])"),
        ("ID_MATCH: ___check_obj_id(G['__builtins_dict___0']['any'], 1), type=<class 'f'>",
         "ID_MATCH: ___check_obj_id(G['__builtins_dict___12']['any'], 2), type=<class 'f'>"),
        ("LAMBDA_GUARD: ___check_opaque_guard_fn_140115977097824_c0/0(L['mesh'])",
         "LAMBDA_GUARD: ___check_opaque_guard_fn_140556759976992_c3/1(L['mesh'])"),
        ("LAMBDA_GUARD: ___check_metadata_140115977097824_c0/0(L['x'])",
         "LAMBDA_GUARD: ___check_metadata_94556759976992_c!2/3/1(L['x'])"),
        ("LAMBDA_GUARD: __dtensor_spec_140115977097824(L['x'])", "LAMBDA_GUARD: __dtensor_spec_94556759976992(L['x'])"),
        ("TYPE_MATCH: ___check_type_id(G['___module_m_140115977097824_c1'], 7), type=<class 'm'>",
         "TYPE_MATCH: ___check_type_id(G['___module_m_140115977099999_c4'], 8), type=<class 'm'>"),
        # the order of a set follows the hash seed
        ("EQUALS_MATCH: G['d'] == frozenset({torch.int8, torch.float32})",
         "EQUALS_MATCH: G['d'] == frozenset({torch.float32, torch.int8})"),
        ("EQUALS_MATCH: G['d'] == {'k': {('a', 1), 'b}', frozenset({2, 3})}}",
         "EQUALS_MATCH: G['d'] == {'k': {frozenset({3, 2}), 'b}', ('a', 1)}}"),
    ],
)  # fmt: skip
def test_ids_addresses_paths_and_device_indices_do_not_count(here: str, there: str) -> None:
    assert one(here + AT) == one(there + AT)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("TRUE_MATCH: L['s'].flag == True", "FALSE_MATCH: L['s'].flag == False"),
        ("EQUALS_MATCH: G['seed'] == 140238573782336", "EQUALS_MATCH: G['seed'] == 140238573782337"),
        ("ID_MATCH: ___check_obj_id(G['c'], 94), type=<Color.BLUE: 2>",
         "ID_MATCH: ___check_obj_id(G['c'], 94), type=<Color.RED: 1>"),
        ("ID_MATCH: ___check_obj_id(G['f'], 94), type=<built-in function gelu>",
         "ID_MATCH: ___check_obj_id(G['f'], 94), type=<built-in function silu>"),
        ("ID_MATCH: ___check_obj_id(G['p'], 94), type=functools.partial(<built-in function max>, 1, 2)",
         "ID_MATCH: ___check_obj_id(G['p'], 94), type=functools.partial(<built-in function max>, 1, 3)"),
        ("TENSOR_MATCH: check_tensor(L['x'], Tensor, torch.float32, device=None, size=[4, 8], stride=[8, 1])",
         "TENSOR_MATCH: check_tensor(L['x'], Tensor, torch.float32, device=None, size=[4, 8], stride=[1, 4])"),
        ('GLOBAL_STATE: ___check_global_state() against {"allow_tf32":false,"num_threads":1}',
         'GLOBAL_STATE: ___check_global_state() against {"allow_tf32":true,"num_threads":1}'),
        ("LAMBDA_GUARD: 2 <= L['x'].size()[0]", "LAMBDA_GUARD: 4 <= L['x'].size()[0]"),
        ("EQUALS_MATCH: G['s'] == 'a # b'", "EQUALS_MATCH: G['s'] == 'a # c'"),
        ("EQUALS_MATCH: G['s'] == {1, 2}", "EQUALS_MATCH: G['s'] == {1, 3}"),
        ("EQUALS_MATCH: G['s'] == {1: 2, 3: 4}", "EQUALS_MATCH: G['s'] == {3: 4, 1: 2}"),
        ("EQUALS_MATCH: G['s'] == '{b, a}'", "EQUALS_MATCH: G['s'] == '{a, b}'"),
        ("EQUALS_MATCH: G['s'] == [{1}, 2]", "EQUALS_MATCH: G['s'] == [2, {1}]"),
    ],
)  # fmt: skip
def test_what_the_user_guards_on_counts(here: str, there: str) -> None:
    assert one(here + AT) != one(there + AT)


def test_the_comment_starts_after_a_string_that_looks_like_one() -> None:
    guard = one(f"EQUALS_MATCH: G['s1'] == 'a # b'        {AT}", source="G['s1']")
    assert guard.expression == "G['s1'] == 'a # b'"
    assert guard.line is not None


@pytest.mark.parametrize("text", ["'it\\'s # here'", '"it\'s # here"', "'ends in a backslash \\\\'", "''", "'#'"])
def test_quotes_in_a_string_do_not_hide_the_comment(text: str) -> None:
    assert split_comments(f"G['s'] == {text}  # code  # m.py:1 in f") == (f"G['s'] == {text}", ["code", "m.py:1 in f"])


def test_a_guard_without_comment_has_no_line() -> None:
    guard = one("NO_TENSOR_ALIASING: check_no_aliasing(L['x'], L['y'])")
    assert (guard.expression, guard.line) == ("check_no_aliasing(L['x'], L['y'])", None)


def test_a_hint_after_the_comment_does_not_hide_the_line() -> None:
    guard = one(f"TYPE_MATCH: ___check_type_id(L['s'], 94), type=<class 'dict'>{AT} (HINT: type dict)")
    assert (guard.expression, str(guard.line)) == (
        "___check_type_id(L['s']), type=<class 'dict'>", "app/model.py:31 in forward",
    )  # fmt: skip


@pytest.mark.parametrize("known", ["/home/me/app/model.py", "/srv/webapp/model.py"])
def test_a_shortened_path_becomes_the_full_one_known_from_the_compile(known: str) -> None:
    guard = one(f"TRUE_MATCH: L['s'].flag == True{AT}", files=(known, "/other/block.py"))
    assert guard.line is not None and guard.line.file == known


def test_an_ambiguous_path_stays_short() -> None:
    guard = one(f"TRUE_MATCH: L['s'].flag == True{AT}", files=("/a/app/model.py", "/b/app/model.py"))
    assert guard.line is not None and guard.line.file == "app/model.py"


def test_a_guard_on_a_group_name_is_a_guard_on_its_role() -> None:
    text = "EQUALS_MATCH: L['self'].group_name == '{}'"
    assert one(text.format("3"), roles={"3": "tp"}) == one(text.format("9"), roles={"9": "tp"})
    assert one(text.format("3"), roles={"3": "tp"}).expression.endswith("group:tp")
    assert one(text.format("3"), roles={"3": "tp"}) != one(text.format("3"), roles={"3": "dp"})


def test_the_number_of_a_hook_differs_by_nature() -> None:
    def expression(number: int, hooks: str = "_forward_hooks_always_called") -> str:
        text = f"| +- DICT_CONTAINS: not ___dict_contains({number}, L['m'].{hooks})"
        return parse_guards(text, roles=GroupRoles({}))[0].expression

    assert expression(1) == expression(23) == "not ___dict_contains(ID, L['m']._forward_hooks_always_called)"
    assert expression(1, "table") != expression(23, "table")


@pytest.mark.parametrize(
    "relation", ["L['x'].storage_offset() == L['x'].size()[1]", "L['x'].size()[1] == 2*L['x'].storage_offset()"]
)
def test_the_size_at_which_a_shard_begins_is_no_guard_of_the_program(relation: str) -> None:
    """Of the ranks that compile `x[:, part]` with dynamic shapes, the second one has it."""
    text = f"+- LAMBDA_GUARD: {relation}  # return x @ w  # model.py:8 in forward"
    assert parse_guards(text, roles=GroupRoles({})) == ()
    of_size = text.replace("storage_offset()", "stride()[0]")
    assert len(parse_guards(of_size, roles=GroupRoles({}))) == 1, "the negative control"


def test_that_a_view_begins_behind_two_elements_is_no_guard_of_the_program() -> None:
    bound = (
        "+- LAMBDA_GUARD: 2 <= L['x'].storage_offset()  # return F.linear(input, self.weight)  # nn/modules/linear.py:1"
    )
    asked = "+- LAMBDA_GUARD: Eq(L['x'].storage_offset(), 0)  # if x.storage_offset() == 0:  # model.py:8 in forward"
    assert [len(parse_guards(text, roles=GroupRoles({}))) for text in (bound, asked)] == [0, 1]
