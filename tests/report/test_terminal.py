from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.report import samples
from tpcompile.evidence.records import RankGroup, Status, Verdict, value_item
from tpcompile.report import terminal


def shown(verdict: Verdict, *, width: int = 80, run: Path | None = Path("runs/x")) -> str:
    """What a console of that width gets, without the padding at the line ends."""
    out = io.StringIO()
    terminal.render(verdict, Console(file=out, width=width), run=run)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_console_and_no_code_is_cut(width: int) -> None:
    text = shown(samples.failing(), width=width)
    lines = [line for line in text.splitlines() if not line.startswith("replay:")]
    assert max(map(len, lines)) <= width
    squeezed = "".join(text.replace("│", "").split())
    assert squeezed.count("".join(samples.LONG_CODE.split())) == 2  # the failed check and the panel
    assert "…" not in text


def test_square_brackets_of_user_text_survive() -> None:
    (detail,) = samples.failing().checks[1].details
    assert "[bold]" in detail and detail in shown(samples.failing())


def test_escape_sequences_of_user_text_do_not_reach_the_terminal() -> None:
    verdict = samples.passing().model_copy(update={"summary": "\x1b[31mred\x07"})
    assert "\x1b" not in shown(verdict)


def test_lines_that_differ_are_shown_under_their_ranks() -> None:
    ours, theirs = (samples.LINE.model_copy(update={"line": n}) for n in (10, 20))
    groups = (
        RankGroup(ranks=(0,), item=value_item("item", "a", line=ours)),
        RankGroup(ranks=(1,), item=value_item("item", "b", line=theirs)),
    )
    verdict = samples.failing().model_copy(update={"divergences": (samples.divergence(groups=groups),)})
    text = shown(verdict)
    assert text.index("rank 0 ") < text.index("block.py:10") < text.index("rank 1 ") < text.index("block.py:20")


def test_a_group_that_has_nothing_says_so() -> None:
    groups = (RankGroup(ranks=(0,), item=value_item("item", "all_reduce")), RankGroup(ranks=(1,)))
    verdict = samples.failing().model_copy(update={"divergences": (samples.divergence(groups=groups),)})
    assert "(nothing)" in shown(verdict)


def test_many_groups_are_counted_not_listed() -> None:
    groups = tuple(RankGroup(ranks=(n,), item=value_item("item", f"text {n}")) for n in range(64))
    verdict = samples.failing().model_copy(update={"divergences": (samples.divergence(groups=groups),)})
    text = shown(verdict)
    assert " 60 more groups" in text
    assert "text 40" not in text


def test_checks_are_grouped_by_mode() -> None:
    checks = tuple(samples.check(name=f"check {m}", mode=m) for m in ("A", "B", "C"))
    text = shown(samples.passing().model_copy(update={"checks": checks}))
    order = [text.index(part) for part in ("\nmode A", "check A", "\nmode B", "check B", "\nmode C", "check C")]
    assert order == sorted(order)


def test_a_verdict_without_checks_still_ends_with_its_summary_and_replay_line() -> None:
    verdict = Verdict(status=Status.FAIL, exit_code=4, world_size=2, summary="no GPU")
    assert shown(verdict, run=None).splitlines()[-1].endswith(f"4): {verdict.summary}")


def test_the_replay_command_is_quoted_and_never_wrapped() -> None:
    folder = Path("runs") / ("long name " * 12).strip()
    assert f" '{folder}'" in shown(samples.passing(), run=folder).splitlines()[-1]


def test_what_an_informing_check_lists_is_in_the_whole_report_only() -> None:
    detail = "rank 1: the log ends in a compile"
    noted = samples.check("ended badly", Status.INFO, observed="1 log", details=(detail,))
    verdict = samples.passing().model_copy(update={"checks": (noted,)})
    for limits, is_shown in ((terminal.USUAL, False), (terminal.WHOLE, True)):
        out = io.StringIO()
        terminal.render(verdict, Console(file=out, width=80), limits=limits)
        assert (detail in out.getvalue()) is is_shown
        assert noted.name in out.getvalue()
