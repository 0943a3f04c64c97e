"""Two statements of one report never contradict each other: over verdicts of every kind, in every renderer."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.evidence.samples import call, compiled, guard, record
from tests.report import samples
from tpcompile.errors import ExitCode
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.verdict import capture_rules, conclude, fetch_from
from tpcompile.evidence.logs.diagnose import Question, diagnose
from tpcompile.evidence.records import RankRecord, Verdict
from tpcompile.report import github, lines, terminal
from tpcompile.report.wording import red_by_kind

JOBS = sorted((Path(__file__).parents[1] / "data" / "jobs" / "torch-2.13.0").iterdir())
RANK_0, RANK_1 = (compiled(guards=(guard(says=f"== {rank}"),)) for rank in (0, 1))
SCALE = [("guards", "scale", "the scale is per rank")]


def judged(*records: RankRecord, allowed: list[tuple[str, str, str]] | None = None) -> Verdict:
    digests = [digest_rank(one) for one in records]
    rules = capture_rules(timeout_s=1, allowed=allowed or ())
    return conclude(rules, digests, fetch_from(records), world_size=len(records))


def four_ranks() -> Verdict:
    """Ranks 2 and 3 differ as declared, and rank 1 multiplies by a different number."""
    odd = compiled(call("mul", "%0", "9"), guards=(guard(says="== 0"),))
    return judged(record(0, RANK_0), record(1, odd), record(2, RANK_0), record(3, RANK_1), allowed=SCALE)


VERDICTS = {
    **{f"job {folder.name}": diagnose([folder]) for folder in JOBS},
    "job uneven": diagnose([JOBS[0].parent / "stride"], Question(uneven=(("healthy", "ragged batches"),))),
    "job ended badly": diagnose([JOBS[0].parent / "warm_cold"], Question(ended_badly=True)),
    "declared": judged(record(0, RANK_0), record(1, RANK_1), allowed=SCALE),
    "undeclared": judged(record(0, RANK_0), record(1, RANK_1)),
    "four ranks": four_ranks(),
    "passing": samples.passing(),
    "failing": samples.failing(),
}


def reports(verdict: Verdict) -> dict[str, str]:
    out = StringIO()
    terminal.render(verdict, Console(file=out, width=200), limits=terminal.WHOLE)
    return {
        "terminal": out.getvalue(),
        "lines": "\n".join(lines.lines(verdict, command="gate")),
        "github": github.summary(verdict).replace("\\", ""),
    }


@pytest.mark.parametrize("name", VERDICTS)
def test_the_groups_of_equal_ranks_are_those_of_the_verdict(name: str) -> None:
    verdict = VERDICTS[name]
    red = [one for one in verdict.divergences if one.is_red and len(one.groups) > 1]
    for domain, groups in verdict.domains.items():
        is_split = any(one.domain in ("", domain) for one in red)
        assert (len(groups) > 1) == is_split, domain
    for renderer, text in reports(verdict).items():
        shown = re.findall(r"equal ranks in .*", text)
        assert len(shown) == len(verdict.domains), renderer
        if verdict.exit_code == ExitCode.PASS:
            assert not [line for line in shown if "|" in line], renderer
            assert ("but for" in "".join(shown)) == bool(verdict.divergences), renderer


@pytest.mark.parametrize("name", VERDICTS)
def test_as_many_differences_are_listed_as_are_counted(name: str) -> None:
    verdict = VERDICTS[name]
    num_red = len(red_by_kind(verdict))  # differences that are alike are counted once
    for renderer in ("terminal", "lines"):
        text = reports(verdict)[renderer]
        counted = set(re.findall(r"difference (\d+) of (\d+)", text))
        assert counted == {(str(number), str(num_red)) for number in range(1, num_red + 1)}, renderer
        num_accepted = sum(map(int, re.findall(r"\(but for (\d+) accepted\)", text)))
        listed = text.partition("accepted difference")[2]
        assert bool(num_accepted) <= bool(listed), renderer


@pytest.mark.parametrize("name", VERDICTS)
def test_a_report_that_says_agree_has_no_difference_and_one_that_passes_says_so(name: str) -> None:
    verdict = VERDICTS[name]
    is_pass = verdict.exit_code == ExitCode.PASS
    is_red = any(one.is_red for one in verdict.divergences) or any(one.is_red for one in verdict.checks)
    assert is_red == (verdict.exit_code not in (ExitCode.PASS, ExitCode.INCOMPLETE))
    for text in (verdict.summary, *reports(verdict).values()):
        assert ("ranks agree" in text) <= is_pass


def test_ranks_that_differ_as_declared_are_not_split_beside_one_that_is_red() -> None:
    assert VERDICTS["four ranks"].domains == {"tp": ((0, 2, 3), (1,))}
