"""Which ranks of a program that reads its rank are traced, and that a fault of a rank between them is named."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.dryrun import reading
from tests.dryrun.test_dryrun import dryrun, records
from tests.forked import Ended
from tpcompile.dryrun import alike
from tpcompile.dryrun.forks import Ended as Traced
from tpcompile.dryrun.plan import Asked, Plan
from tpcompile.dryrun.rank import Left
from tpcompile.evidence.records import Check, CheckId, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.replay import replay

ODD = 4
"""In the middle of three groups: a rank that is not traced unless it starts differently."""


def run(folder: Path, fault: str = "", *arguments: str, odd: int = ODD) -> tuple[Ended, Verdict]:
    settings = ("--set", f"fault={fault}", "--set", f"odd={odd}") if fault else ()
    ended, verdict = dryrun(folder, "--mesh", "dp=3,tp=3", *settings, *arguments, function="reading:build")
    assert verdict is not None, ended.stdout + ended.stderr
    assert ended.left_running == ()
    return ended, verdict


def failed(verdict: Verdict, check_id: CheckId) -> Check:
    (check,) = (check for check in verdict.checks if check.id == check_id and check.is_red)
    return check


def line_of(marker: str) -> int:
    lines = Path(reading.__file__).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# fault: {marker}"))
    return number


def test_a_rank_that_starts_as_a_traced_one_is_built_alone(tmp_path: Path) -> None:
    ended, verdict = run(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert set(records(tmp_path)) < set(range(9))
    assert {0, 1, 2} <= set(records(tmp_path)) and {6, 7, 8} & set(records(tmp_path))
    assert sum(map(len, verdict.domains.values())) >= 3
    assert re.search("; [3-8] of 9 ranks .*others start", verdict.summary)
    assert len(records(tmp_path)) < 9


@pytest.mark.parametrize(
    ("fault", "line"), [("attribute", "attribute"), ("group", "group"), ("order", "order"), ("step", None)]
)
def test_a_fault_of_a_rank_in_the_middle_is_named(fault: str, line: str | None, tmp_path: Path) -> None:
    ended, verdict = run(tmp_path, fault)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert verdict.lead is not None
    assert verdict.lead.ranks == (ODD,)
    if line is not None:
        assert verdict.lead.line is not None
        assert verdict.lead.line.line == line_of(line)
    if fault == "order":
        check = failed(verdict, CheckId.GROUPS)
        assert (check.ranks, check.cause) == ((ODD,), Cause.GROUP)
    again = replay(RunDir(tmp_path / "run"))
    assert (again.exit_code, again.lead and again.lead.ranks) == (1, (ODD,))


@pytest.mark.parametrize("fault", ["step", "random"])
def test_where_calls_read_the_rank_or_draw_numbers_every_rank_is_traced(fault: str, tmp_path: Path) -> None:
    ended, verdict = run(tmp_path, fault, odd=-1)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "were traced" not in verdict.summary


def test_a_package_that_keeps_the_rank_is_found_by_the_ranks_that_are_traced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "keeps_rank.py"
    package.parent.mkdir()
    package.write_text("KEPT = {}\n\ndef rows():\n    return 4 if KEPT['rank'] in (6, 7, 8) else 3\n")
    monkeypatch.setenv("KEEPS_RANK", str(tmp_path))
    seeds = {drawn_between(3, 6): None}
    ended, verdict = run(tmp_path, "package", "--seed", str(*seeds))
    assert ended.returncode == 0, ended.stdout + ended.stderr  # the groups differ, which may be
    assert "were traced" not in verdict.summary


def drawn_between(first: int, last: int) -> int:
    """A seed with which a rank of the middle group is traced in any case."""
    for seed in range(100):
        plan = Plan(target="", axes=(("dp", 3), ("tp", 3)), ranks=tuple(range(9)), seed=seed)
        if any(map(plan.is_certain, range(first, last))):
            return seed
    raise AssertionError("no seed draws such a rank")


def test_a_rank_whose_build_raises_is_listed_in_its_domain(tmp_path: Path) -> None:
    _, verdict = run(tmp_path, "raise")
    assert failed(verdict, CheckId.NO_ERROR).ranks == (ODD,)
    assert set(verdict.domains) == {"tp 0-2", "tp 3-5", "tp 6-8"}


def test_a_rank_that_is_killed_is_named_and_the_others_are_judged(tmp_path: Path) -> None:
    ended, verdict = run(tmp_path, "killed")
    assert ended.returncode == 1
    assert failed(verdict, CheckId.REPORTED).ranks == (ODD,)
    assert 0 in records(tmp_path) and {6, 7, 8} & set(records(tmp_path))


def test_a_rank_that_never_returns_is_ended_with_what_it_started(tmp_path: Path) -> None:
    ended, verdict = run(tmp_path, "never returns", "--timeout-s", "20")
    assert ended.returncode == 1
    assert failed(verdict, CheckId.REPORTED).ranks == (ODD,)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_run_that_is_stopped_keeps_and_judges_what_was_traced(name: str, code: int, tmp_path: Path) -> None:
    ended, verdict = run(tmp_path, name)
    assert (ended.returncode, verdict.exit_code) == (code, 6), ended.stdout + ended.stderr
    assert {0, 1, 2} <= set(records(tmp_path))
    assert re.search("; [3-8] of 9 ranks .*stopped$", verdict.summary)


def test_the_first_group_does_not_wait_for_its_first_rank_and_is_told_what_that_has_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_by_rank_0.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(alike, "warm_up", lambda _: None)
    asked: dict[int, Asked] = {}
    is_imported: dict[int, bool] = {}

    def run(ranks: Sequence[int], ask: Callable[[int], Asked]) -> Iterator[Traced]:
        for at in range(0, len(ranks), 2):  # two at a time
            for rank in ranks[at : at + 2]:
                is_imported[rank] = "imported_by_rank_0" in sys.modules
                asked[rank] = ask(rank)
            for rank in ranks[at : at + 2]:
                yield Traced(rank, Left(imported=("imported_by_rank_0",) if rank == 0 else (), groups="g"))

    plan = Plan(target="", axes=(("dp", 3), ("tp", 4)), ranks=tuple(range(12)))
    ended = list(alike.trace_ranks(SimpleNamespace(plan=plan, run=run)))  # type: ignore[arg-type]
    assert [one.rank for one in ended[:4]] == [0, 1, 2, 3]
    assert sorted(asked) == list(range(12))
    assert is_imported == {rank: rank > 1 for rank in range(12)}
    assert [rank for rank, one in asked.items() if one.is_first or one.is_watched] == [0]
    assert {rank for rank, one in asked.items() if not one.groups} == {0, 1}
