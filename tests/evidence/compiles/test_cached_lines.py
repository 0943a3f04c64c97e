"""Lines of graphs out of a compile cache: those of the program that filled it -> those of this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpcompile.evidence.compiles.cached_lines import with_current_lines, with_current_stacks
from tpcompile.evidence.compiles.collectives import collectives_of
from tpcompile.evidence.records import Graph, Node, UserLine

REDUCE = 'return funcol.all_reduce(y, "sum", group)'
LIBRARY = UserLine(file="/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line=9, function="forward")


def line(number: int, code: str = REDUCE, file: str = "/app/model.py") -> UserLine:
    """A line of a user's forward."""
    return UserLine(file=file, line=number, function="forward", code=code)


def graph(kind: str, *lines: UserLine) -> Graph:
    """A graph of one collective for each line."""
    target = "torch.ops._c10d_functional.all_reduce.default"
    return Graph(kind=kind, nodes=tuple(Node(scope="", op="call", target=target, line=one) for one in lines))


def blamed(dynamo: Graph, lowered: Graph) -> list[UserLine | None]:
    """The lines of the collectives."""
    return [found.line for found in collectives_of(with_current_lines([dynamo], [lowered]))]


@pytest.mark.parametrize("file", ["/app/model.py", "/app/copy.py"])
def test_a_line_that_has_moved_since_is_that_of_now(file: str) -> None:
    """Two lines were put above it, or the program that filled the cache is a copy of this one."""
    assert blamed(graph("dynamo", line(27)), graph("forward", line(25, file=file))) == [line(27)]


def test_a_comment_that_was_put_behind_a_line_is_no_different_code() -> None:
    now = line(27, f"{REDUCE}  # why")
    assert blamed(graph("dynamo", now), graph("forward", line(25))) == [now]


def test_without_a_cache_a_line_of_the_lowered_graph_stays() -> None:
    found = collectives_of([graph("dynamo", line(27)), graph("forward", line(25))])
    assert [one.line for one in found] == [line(25)]


def test_of_equal_lines_the_second_becomes_the_second() -> None:
    assert blamed(graph("dynamo", line(9), line(12)), graph("backward", line(10), line(7))) == [line(12), line(9)]


def test_lines_that_have_not_moved_stay_although_some_are_not_lowered() -> None:
    assert blamed(graph("dynamo", line(9), line(12)), graph("forward", line(12))) == [line(12)]


def test_a_line_of_code_that_no_longer_exists_is_no_line() -> None:
    assert blamed(graph("dynamo", line(9, "return y")), graph("forward", line(9))) == [None]


def test_a_line_that_only_the_lowered_graph_has_stays_where_the_source_has_it(tmp_path: Path) -> None:
    """The backward of an autograd function of the user's, which Dynamo does not show."""
    file = tmp_path / "model.py"
    file.write_text(f"class Mine:\n    {REDUCE}\n")
    own = line(2, file=str(file))
    assert blamed(graph("dynamo", line(9, "return y", str(file))), graph("backward", own)) == [own]


def test_a_line_of_a_different_program_is_no_line_although_its_source_has_it(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(f"class Mine:\n    {REDUCE}\n")
    assert blamed(graph("dynamo", line(9, "return y")), graph("backward", line(2, file=str(file)))) == [None]


def test_lines_of_a_library_are_left_to_the_search_for_their_caller() -> None:
    assert blamed(graph("dynamo", line(9, "return y")), graph("forward", LIBRARY)) == [LIBRARY]


def stack(number: int, file: str = "/app/model.py", code: str = REDUCE) -> str:
    """The stack of a node as torch prints it, with the line of a module around it."""
    outer = f'  File "{file}", line {number + 20}, in outer\n    x = self.block(x)\n'
    inside = f'  File "{LIBRARY.file}", line 9, in forward\n    return input\n'
    return f'{outer}  File "{file}", line {number}, in forward\n    {code}\n{inside}'


def test_a_stack_of_the_program_that_filled_the_cache_becomes_that_of_this_program() -> None:
    assert with_current_stacks([stack(14, "/app/other.py"), ""], [stack(15), stack(9, code="y = x")]) == [stack(15), ""]


def test_a_stack_without_its_like_in_this_program_is_left_out() -> None:
    assert with_current_stacks([stack(14)], [stack(14, code="y = x")]) == [""]


def test_of_stacks_with_equal_code_the_second_becomes_the_second() -> None:
    cached = [stack(14), stack(11), stack(14)]
    assert with_current_stacks(cached, [stack(13), stack(16)]) == [stack(16), stack(13), stack(16)]


def test_stacks_with_equal_code_of_which_the_number_differs_are_left_out_unless_they_have_not_moved() -> None:
    traced = [stack(13), stack(16)]
    assert with_current_stacks([stack(14)], traced) == [""]
    assert with_current_stacks([stack(16)], traced) == [stack(16)]
