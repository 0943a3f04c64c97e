"""evidence/timeline/source: names that a line of a program reads, and those that it gives a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpcompile.evidence.timeline import source
from tpcompile.evidence.timeline.flow import Code
from tpcompile.evidence.timeline.values import Scopes

CODES = [Code(file="m.py", function="main", line=1)]
PROGRAM = """\
print(f"loss {loss.item()}")
log.info("%s", queue.popleft())
item = queue.popleft()
with autocast(dtype=chosen):
    out = step(x)
after = out
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


def test_what_is_printed_is_read_and_not_changed(program: str) -> None:
    """A method that is called elsewhere may change its object: the negative control."""
    assert "loss" in source.read(program, 1) and source.assigned(program, 1) == frozenset()
    assert "queue" not in source.assigned(program, 2)
    assert source.assigned(program, 3) == {"item", "queue"}


def test_what_runs_in_a_with_block_reads_its_expressions_and_what_follows_does_not(program: str) -> None:
    assert "chosen" in source.read(program, 5)
    assert "chosen" not in source.read(program, 6)


def test_the_passes_of_loops_in_two_files_are_two_names(tmp_path: Path) -> None:
    """On the same line, too. An attribute, which any object may have, is one name in the whole program."""
    files = [tmp_path / name for name in ("first.py", "second.py")]
    for file in files:
        file.write_text("for x in rows:\n    x.width = 1\n")
    for line, num_names in ((1, 2), (2, 1)):
        given = [source.assigned(str(file), line) - {"x"} for file in files]
        assert len({Scopes(CODES).of(0, name) for (name,) in given}) == num_names


def test_a_line_that_speaks_of_ranks(program: str, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("number = dist.get_rank()\nnumber = 1\n")
    assert [source.speaks_of_rank(str(own), line) for line in (1, 2)] == [True, False]


def test_a_function_of_a_module_changes_no_attribute(tmp_path: Path) -> None:
    """A method of an object that a module has may change it: the negative control."""
    own = tmp_path / "own.py"
    own.write_text("import os\nfrom state import run\nfile = os.path.join(a, b)\nrun.losses.append(a)\n")
    assert [source.assigned(str(own), line) for line in (3, 4)] == [{"file"}, {".losses"}]


def test_a_line_that_computes_the_part_of_a_rank(tmp_path: Path) -> None:
    lines = ["begin = rank * each", "row = get_rank() // 2", "own = 3 % self.tp_rank", "x = 8 * (rank == 1)"]
    own = tmp_path / "own.py"
    own.write_text("\n".join(lines) + "\n")
    assert [source.parts_by_rank(str(own), number) for number in (1, 2, 3, 4)] == [True, True, True, False]


def test_a_number_and_its_float_are_two_literals(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("a, b, c, d = 1, 1.0, True, 1\n")
    assert sorted(map(repr, source.literals(str(own)))) == ["1", "1.0", "True"]


@pytest.mark.parametrize(
    ("body", "made"),
    [
        (["length = 1", "for width in widths:", "    if is_reached(width):", "        length = width"], 4),
        (["length = 0", "for width in widths:", "    length += width"], 4),
        (["length = 1", "if is_long:", "    rest = 2"], 2),
        (["found = []", "found.append(length)"], 4),
    ],
    ids=["under a condition", "in a loop", "before a condition", "given"],
)
def test_a_bare_return_says_less_than_what_gave_the_name_its_value(body: list[str], made: int, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    lines = ["def length_of(widths, is_long, length=0):", *(f"    {line}" for line in body)]
    file.write_text("\n".join([*lines, "    return length", "def other(x):", "    return x + 1", ""]))
    at_return = len(lines) + 1
    assert source.made_at(str(file), at_return) == (made if "length" in "".join(body).split("=")[0] else at_return)
    assert source.made_at(str(file), at_return + 2) == at_return + 2  # more than a name


def test_a_condition_around_the_return_as_well_does_not_decide_what_it_returns(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    lines = ["def length_of(widths):", "    if widths:", "        length = sum(widths)", "        return length"]
    file.write_text("\n".join([*lines, "    return 0", ""]))
    assert source.made_at(str(file), 4) == 3
