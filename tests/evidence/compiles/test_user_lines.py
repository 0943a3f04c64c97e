"""A node whose frame is the library's -> the user's line that made it, not the line before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tpcompile.evidence.compiles.user_lines import is_there, with_user_lines
from tpcompile.evidence.records import Graph, Guard, Node, UserLine
from tpcompile.evidence.text.lines import is_library

SOURCE = """def forward(x):
    y = relu(x)
    y = fc.all_reduce(y, "sum", group)
    z = fc.all_gather_tensor(y, 0, group)
    return z * 2
"""
LIBRARY = "/venv/lib/python3.11/site-packages/torch/distributed/_functional_collectives.py"


def user(number: int, file: str = "/app/model.py") -> UserLine:
    """A line of the program above."""
    return UserLine(file=file, line=number, function="forward", code=SOURCE.splitlines()[number - 1].strip())


def call(op: str, line: UserLine | None = None) -> Node:
    """A node; without a line of the user it is made in the library."""
    inner = UserLine(file=LIBRARY, line=9, function=op, code="torch.ops._c10d_functional")
    return Node(scope="", op="call", target=f"torch.ops._c10d_functional.{op}.default", line=line or inner)


def graph(file: str, kind: str = "dynamo") -> Graph:
    """The program above; its backward goes through it from the end."""
    nodes = [call("relu", user(2, file)), call("all_reduce"), call("wait_tensor"), call("all_gather_tensor")]
    nodes.append(call("mul", user(5, file)))
    return Graph(kind=kind, nodes=tuple(nodes[::-1] if kind == "backward" else nodes))


def numbers(found: tuple[Graph, ...]) -> list[int]:
    """The user's lines of the nodes of the only graph."""
    return [node.line.line for node in found[0].nodes if node.line]


def test_a_device_or_pipe_that_a_log_names_as_source_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "model.py"
    os.mkfifo(pipe)
    for file in (pipe, "/dev/zero", tmp_path):
        assert not is_there(UserLine(file=str(file), line=1, function="forward", code="y = x"))


@pytest.mark.parametrize("kind", ["dynamo", "forward"])
def test_the_line_of_a_collective_comes_from_the_source_file(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(SOURCE)
    assert numbers(with_user_lines([graph(str(file), kind)], [])) == [2, 3, 3, 4, 5]


def test_the_backward_goes_through_the_source_from_its_end(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(SOURCE)
    found = with_user_lines([graph(str(file), "backward")], [])
    assert numbers(found)[:2] == [5, 4] and numbers(found)[-2:] == [3, 2]


def test_a_guard_names_the_line_where_the_source_is_not_at_hand() -> None:
    guard = Guard(type="ID_MATCH", source="G['fc']", expression="", line=user(3))
    assert numbers(with_user_lines([graph("/app/model.py")], [guard]))[1] == 3


def test_a_source_file_that_changed_since_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import os\n" + SOURCE)
    assert numbers(with_user_lines([graph(str(file))], []))[1] == 9


@pytest.mark.parametrize(
    ("file", "is_theirs"),
    [
        ("/usr/lib/python3.12/contextlib.py", True),
        ("/home/me/.conda/envs/a/lib/python3.11/logging/__init__.py", True),
        ("<frozen runpy>", True),
        ("/home/me/pytorch/torch/_dynamo/external_utils.py", True),
        ("/usr/lib/python3.12/site-packages/mymodel/block.py", False),
        ("/home/me/torch/train.py", False),
        ("/src/tpcompile/sentinel/sentinel.py", True),
    ],
)
def test_lines_of_python_and_of_torch_are_nobodys_program(file: str, is_theirs: bool) -> None:
    assert is_library(UserLine(file=file, line=1)) == is_theirs
