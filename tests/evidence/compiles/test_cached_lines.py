"""Lines of graphs out of a compile cache: those of the program that filled it -> those of this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpcompile.evidence.compiles.cached_lines import with_current_lines
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
    assert blamed(graph("dynamo", line(9, "return y")), graph("backward", own)) == [own]


def test_lines_of_a_library_are_left_to_the_search_for_their_caller() -> None:
    assert blamed(graph("dynamo", line(9, "return y")), graph("forward", LIBRARY)) == [LIBRARY]
