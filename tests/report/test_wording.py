from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.report import samples
from tpcompile.evidence.judgement.equal_ranks import equal_ranks
from tpcompile.evidence.logs.diagnose import diagnose
from tpcompile.evidence.records import Lead, RankGroup, UserLine, value_item
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.report import github, junit, lines, terminal, wording

JOBS = Path(__file__).parents[1] / "data" / "jobs" / "torch-2.13.0"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((), ""), ((0,), "0"), ((0, 1), "0-1"), ((0, 1, 2, 5), "0-2,5"), ((7, 0, 6), "0,6-7")],
)
def test_ranks_are_written_as_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(ranks) == text


def test_groups_are_separated_by_a_bar() -> None:
    assert wording.groups_text(((0, 1, 2, 3, 4, 5, 6), (7,))) == "0-6 | 7"


def test_control_characters_become_visible_escapes() -> None:
    assert wording.plain("a\x1b[31mb\x00\ud800\tc\nd") == "a\\x1b[31mb\\x00\\ud800    c\nd"


def test_the_smallest_group_is_blamed() -> None:
    odd, others = (UserLine(file=name, line=1) for name in ("odd.py", "others.py"))
    groups = (
        RankGroup(ranks=(0, 1), item=value_item("item", "a", line=others)),
        RankGroup(ranks=(2,), item=value_item("item", "b", line=odd)),
    )
    assert samples.divergence(groups=groups).line == odd


def test_of_two_equal_groups_the_one_without_rank_0_is_blamed() -> None:
    lines = [UserLine(file=f"rank{n}.py", line=1) for n in (0, 1)]
    groups = tuple(RankGroup(ranks=(n,), item=value_item("item", str(n), line=lines[n])) for n in (0, 1))
    assert samples.divergence(groups=groups).line == lines[1]


def test_a_huge_item_is_cut_with_a_note() -> None:
    text = wording.item_text(value_item("x", "x" * 4995))
    assert len(text) < 2100
    assert re.fullmatch(r"x :: x+\.\.\.\(\d+ characters\)\.\.\.x+", text)


def test_cause_step_and_guard_of_both_sides_are_in_one_place() -> None:
    found = samples.divergence(cause=Cause.STRIDE, step=4, guard="stride of 'x' is 1", held="stride of 'x' is 8")
    cause, step, failed, held = wording.cause_lines(found)
    assert cause.endswith(Cause.STRIDE.value) and step.endswith(" 4")
    assert "rank 7" in failed and failed.endswith(found.guard)
    assert "ranks 0-6" in held and held.endswith(found.held)


def test_one_guard_that_failed_on_one_side_is_printed_once() -> None:
    found = samples.divergence(cause=Cause.PYTHON_VALUE, guard="not trace", held="not trace")
    _, guard = wording.cause_lines(found)
    assert "rank 7" in guard and "ranks 0-6" in guard and guard.endswith(found.guard)


def test_a_side_without_an_item_is_blamed_by_the_line_of_its_frame() -> None:
    frame = UserLine(file="/repo/model.py", line=3)
    groups = (RankGroup(ranks=(0,)), RankGroup(ranks=(1,), frame_line=frame))
    assert samples.divergence(groups=groups).line == frame


def test_every_report_has_the_cause() -> None:
    found = samples.failing().model_copy(update={"divergences": (samples.divergence(cause=Cause.STRIDE),)})
    console = Console(file=io.StringIO(), width=80)
    terminal.render(found, console)
    texts = [console.file.getvalue(), junit.render(found), github.summary(found)]  # type: ignore[attr-defined]
    assert all(Cause.STRIDE.value in text for text in texts)


def test_the_guard_that_explains_a_collective_stands_beside_the_cause() -> None:
    verdict = diagnose([JOBS / "reduce_op"])
    guards = re.findall(r"rank (\d): L\['op'\] == '(\w+)'", wording.guard_line(verdict))
    assert guards == [("1", "max"), ("0", "sum")]
    assert any(wording.guard_line(verdict) in line for line in lines.lines(verdict, command="diagnose")[:2])


@pytest.mark.parametrize("job", ["training_scale", "stride", "cold_shared"])
def test_a_finding_that_is_a_guard_itself_does_not_say_it_twice(job: str) -> None:
    assert wording.guard_line(diagnose([JOBS / job])) == ""


@pytest.mark.parametrize(
    ("cause", "do_first", "slugs"),
    [(Cause.RANK_BRANCH, "Move it.", ["rank-branch"]), (Cause.KILLED, "", []), (Cause.UNKNOWN, "Look at it.", [])],
)
def test_a_cause_with_advice_is_explained_by_a_command(cause: Cause, do_first: str, slugs: list[str]) -> None:
    lead = Lead(cause=cause, says="it differs", do_first=do_first)
    assert [text.rpartition(" ")[2] for text in wording.more_lines(lead)] == slugs


def test_a_rank_without_a_record_is_equal_to_nobody() -> None:
    whole = samples.passing().model_copy(update={"world_size": 2, "domains": {"tp": ((0, 1),)}})
    lost = whole.model_copy(update={"domains": {"tp": ((0,),)}})
    assert [text.rpartition(" ")[2] for text, _ in equal_ranks(whole)] == ["equal)"]
    assert [text.rpartition(" ")[2] for text, _ in equal_ranks(lost)] == ["0", "1"]
