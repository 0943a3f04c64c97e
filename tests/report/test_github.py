from __future__ import annotations

from pathlib import Path

import pytest

from tests.report import samples
from tpcompile.evidence.records import CheckId, Lead, RankGroup, Status, UserLine, Verdict, value_item
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.records.findings import Parted, Went
from tpcompile.report import github

WORKSPACE = Path("/repo")


def red(*, line: UserLine | None = samples.LINE, **fields: object) -> Verdict:
    """A verdict with one failed check."""
    check = samples.check(status=Status.FAIL, line=line, **fields)
    return samples.failing().model_copy(update={"checks": (check,), "divergences": ()})


def test_an_annotation_names_file_line_and_title_relative_to_the_workspace() -> None:
    first = github.annotations(samples.failing(), WORKSPACE)[0]
    assert first.startswith("::error file=models/block.py,line=12,title=graph differs (rank 7)::")


@pytest.mark.parametrize(
    ("ranks", "is_known", "title"),
    [((7,), True, f"{Cause.RANK_CONSTANT} (rank 7)"), ((0, 1), False, f"{Cause.RANK_CONSTANT} (ranks 0-1 differ)")],
)
def test_the_title_of_an_annotation_is_cause_and_ranks(ranks: tuple[int, ...], is_known: bool, title: str) -> None:
    """One rank of many is outvoted; of two, nobody."""
    usual = tuple(range(7)) if is_known else (0,)
    groups = tuple(RankGroup(ranks=side, item=value_item("%4", str(side))) for side in (usual, ranks[-1:]))
    found = samples.divergence(cause=Cause.RANK_CONSTANT, groups=groups)
    verdict = samples.failing().model_copy(update={"checks": (), "divergences": (found,)})
    (line,) = github.annotations(verdict, WORKSPACE)
    assert f"title={title}::{found.title.replace('%', '%25')}" in line


def test_a_check_that_blames_the_line_of_a_divergence_is_not_annotated_twice() -> None:
    assert len(github.annotations(samples.failing(), WORKSPACE)) == 1


def test_a_file_outside_the_workspace_keeps_its_path() -> None:
    (line,) = github.annotations(red(), Path("/elsewhere"))
    assert "file=/repo/models/block.py," in line


def test_paths_in_the_message_are_relative_too_and_advice_is_its_first_sentence() -> None:
    """`allow` would hide a mistake: the report has it."""
    found = samples.divergence(guard=f"a guard at {samples.LINE}", advice="Do this. Or hide it.")
    verdict = samples.failing().model_copy(update={"checks": (), "divergences": (found,)})
    (line,) = github.annotations(verdict, WORKSPACE)
    assert "guard at models/block.py:12" in line and "/repo" not in line
    assert line.endswith("Do this.")


def test_percent_and_newlines_are_escaped_in_the_message() -> None:
    (line,) = github.annotations(red(details=("100% of\nranks",)), WORKSPACE)
    assert line.endswith("%0A100%25 of%0Aranks")
    assert "\n" not in line


def test_colons_and_commas_are_escaped_in_properties() -> None:
    source = UserLine(file="/repo/a,b:c.py", line=3)
    (line,) = github.annotations(red(name="graphs: 1, not 2", line=source), WORKSPACE)
    assert "file=a%2Cb%3Ac.py," in line and "title=failed%3A graphs%3A 1%2C not 2::" in line


def test_there_are_at_most_ten_errors() -> None:
    lines = [UserLine(file="/repo/a.py", line=n) for n in range(30)]
    checks = tuple(samples.check(name=f"check {line.line}", status=Status.FAIL, line=line) for line in lines)
    assert len(github.annotations(samples.failing().model_copy(update={"checks": checks}), WORKSPACE)) == 10


def test_a_line_that_differs_in_two_compiles_is_one_error_and_two_lines_are_two() -> None:
    first, again = samples.divergence(title="in C/first"), samples.divergence(title="in C/resized")
    verdict = samples.failing().model_copy(update={"checks": (), "divergences": (first, again)})
    assert len(github.annotations(verdict, WORKSPACE)) == 1
    elsewhere = RankGroup(ranks=(0,), item=value_item("item", "a", line=UserLine(file="/repo/b.py", line=1)))
    other = samples.divergence(groups=(elsewhere, RankGroup(ranks=(1, 2))))
    assert len(github.annotations(verdict.model_copy(update={"divergences": (first, other)}), WORKSPACE)) == 2


def test_wrong_numbers_below_a_difference_are_no_error_of_their_own_and_alone_they_are() -> None:
    numbers = samples.check(name="forward right", status=Status.FAIL)
    verdict = samples.failing().model_copy(update={"checks": (numbers,)})
    assert not [line for line in github.annotations(verdict, WORKSPACE) if "forward right" in line]
    (line,) = github.annotations(verdict.model_copy(update={"divergences": ()}), WORKSPACE)
    assert "title=forward right::" in line


def test_a_rank_that_died_is_the_only_error() -> None:
    died = samples.check(name="", id=CheckId.ALIVE, status=Status.FAIL, observed="rank 1 was killed")
    verdict = samples.failing()
    (line,) = github.annotations(verdict.model_copy(update={"checks": (died, *verdict.checks)}), WORKSPACE)
    assert died.observed in line


def test_a_check_without_a_line_is_annotated_without_a_file() -> None:
    (line,) = github.annotations(red(line=None), WORKSPACE)
    assert line.startswith("::error title=graphs::")


def test_a_red_verdict_without_checks_has_one_annotation_and_a_green_one_none() -> None:
    verdict = Verdict(status=Status.FAIL, exit_code=4, world_size=2, summary="no GPU")
    (line,) = github.annotations(verdict, WORKSPACE)
    assert line.startswith("::error title=") and line.endswith(f"::{verdict.summary}")
    assert github.annotations(samples.passing(), WORKSPACE) == []


def test_the_summary_is_a_table_whose_cells_cannot_break_it() -> None:
    text = github.summary(red(name="a|b", observed="x\ny <b> `c`"))
    (row,) = [line for line in text.splitlines() if "a\\|b" in line]
    assert "| x y \\<b\\> \\`c\\` |" in row


def test_user_code_with_backticks_stays_inside_its_fence() -> None:
    line = samples.LINE.model_copy(update={"code": "s = '```'"})
    groups = tuple(
        g.model_copy(update={"item": g.item and g.item.model_copy(update={"line": line})})
        for g in samples.divergence().groups
    )
    text = github.summary(samples.failing().model_copy(update={"divergences": (samples.divergence(groups=groups),)}))
    assert "\n````\n" in text


def test_a_huge_summary_is_cut_below_the_limit() -> None:
    checks = tuple(samples.check(name=f"{n} " + "x " * 500) for n in range(2000))
    text = github.summary(samples.passing().model_copy(update={"checks": checks}))
    assert len(text.encode()) < 1024 * 1024
    assert "verdict.json" in text.splitlines()[-1]


def test_nothing_is_written_outside_of_actions(tmp_path: Path) -> None:
    target = tmp_path / "summary.md"
    assert github.write(samples.failing(), {"GITHUB_STEP_SUMMARY": str(target)}) == []
    assert not target.exists()


def test_in_actions_the_summary_is_appended_and_the_annotations_come_back(tmp_path: Path) -> None:
    target = tmp_path / "summary.md"
    target.write_text("before\n")
    environ = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(target), "GITHUB_WORKSPACE": "/repo"}
    assert github.write(samples.failing(), environ) == github.annotations(samples.failing(), WORKSPACE)
    assert target.read_text() == "before\n" + github.summary(samples.failing())


def test_the_line_that_made_the_ranks_differ_comes_before_the_one_that_has_the_difference() -> None:
    """Without it, the negative control, only the line that reads the value is annotated."""
    origin = UserLine(file="/app/tuning.py", line=22, function="load")
    sides = tuple(
        Went(ranks=(rank,), how="value", line=origin, value=f"name = {value}") for rank, value in enumerate("ab")
    )
    lead = Lead(cause=Cause.DTYPE, says="bf16 / f32", ranks=(0, 1), is_rank_known=False, line=origin, do_first="Cast.",
                parted=Parted(line=origin, times=0, sides=sides))  # fmt: skip
    plain = red()
    first, *others = github.annotations(plain.model_copy(update={"lead": lead}), Path("/app"))
    assert first.startswith(f"::error file=tuning.py,line=22,title={lead.cause.value} (ranks 0-1 ")
    assert "name = a" in first and "name = b" in first and "do first" in first
    assert others == github.annotations(plain, Path("/app"))
