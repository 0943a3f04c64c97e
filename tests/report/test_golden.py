"""What each renderer prints, whole: the one place where the sentences of a report are pinned.

Record again with UPDATE_GOLDEN=1 pytest tests/report/test_golden.py, and read the diff.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.evidence.samples import broken, call, compiled, counters, guard, line, record, reduce, tensor
from tests.golden import DATA, recorded
from tests.report import samples
from tests.report.test_many_ranks import of_several_faults
from tests.report.test_many_ranks import verdict as of_many
from tests.report.test_progress import status
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.equal_ranks import equal_ranks
from tpcompile.evidence.judgement.verdict import Absent, capture_rules, conclude, fetch_from
from tpcompile.evidence.logs.diagnose import diagnose
from tpcompile.evidence.records import CompileRecord, RankRecord, Status, Verdict
from tpcompile.evidence.records.findings import Parted, Went
from tpcompile.report import github, junit, lines, terminal, wording
from tpcompile.report.progress import progress_line

GOLDEN = DATA / "reports"


def judged(*ranks: list[CompileRecord], absent: tuple[Absent, ...] = ()) -> Verdict:
    """The verdict on ranks that compiled this."""
    world_size = len(ranks) + len(absent)
    records: list[RankRecord] = []
    for rank, compiles in enumerate(ranks):
        records.append(record(rank, *compiles, world_size=world_size, counters=(counters(),)))
    rules = capture_rules(timeout_s=60, allowed=[("guards", "depth", "one layer more on the last stage")])
    digests = [digest_rank(one) for one in records]
    return conclude(rules, digests, fetch_from(records), world_size=world_size, absent=absent)


def recompiled() -> Verdict:
    """Rank 0 compiles again where a guard fails, and evaluates; a guard differs as declared."""
    deep = [guard(), guard(source="L['self'].depth", says="== 4")]
    reason = "0/0: L['self'].scale == 1"
    again = compiled(compile_id="0/1", guards=(guard(says="== 2"),), recompile_reasons=(reason,), step=7)
    evaluation = compiled(
        call("relu", at=90),
        compile_id="1/0",
        function="evaluate",
        line=line(90),
        collectives=(),
        called_from=(line(95),),
    )
    deeper = [guard(), guard(source="L['self'].depth", says="== 5")]
    return judged([compiled(guards=tuple(deep)), again, evaluation], [compiled(guards=tuple(deeper))])


def broke() -> Verdict:
    """Rank 1 breaks its graph, rank 2 is fed a different stride and rank 3 left nothing."""
    strided = compiled(inputs=(tensor(stride="[1, 4]"),))
    cut = compiled(call("mul", "%0", "2"), breaks=(broken(),), collectives=())
    return judged([compiled()], [cut], [strided], absent=(Absent(3, "in phase C/first"),))


def parted() -> Verdict:
    """The ranks parted in one line, and it is seen in another one; checks say it again, and some follow from it."""
    seen, origin = samples.LINE, samples.OTHER_LINE
    sides = tuple(Went(ranks=(rank,), how="value", line=origin, value=f"returns {rank}") for rank in range(2))
    lead = samples.LEAD.model_copy(
        update={"line": origin, "seen_at": seen, "parted": Parted(line=origin, times=0, sides=sides)}
    )
    found = samples.check("found", Status.FAIL, observed=lead.says, line=origin, details=("a", "b", "a"))
    follows = [samples.check(name, Status.FAIL, is_consequence=True) for name in ("one", "two")]
    update = {
        "lead": lead,
        "checks": (found, *follows),
        "taints": tuple(samples.taint(text=text) for text in "abc"),
        "hosts": {"node-a": tuple(range(4)), "node-b": tuple(range(4, 8))},
    }
    return samples.failing().model_copy(update=update)


VERDICTS: dict[str, Callable[[], Verdict]] = {
    "failing": samples.failing,
    "passing": samples.passing,
    "recompiled": recompiled,
    "broke": broke,
    "parted": parted,
    "branched": lambda: judged([compiled()], [compiled(call("torch.relu", "%0", at=7), reduce("%1"))]),
}


def in_terminal(verdict: Verdict) -> str:
    out = io.StringIO()
    terminal.render(verdict, Console(file=out, width=80), run=Path("runs/x"), limits=terminal.WHOLE)
    return "".join(f"{text.rstrip()}\n" for text in out.getvalue().splitlines())


def in_lines(verdict: Verdict) -> str:
    return "".join(f"{text}\n" for text in lines.lines(verdict, command="gate"))


def in_github(verdict: Verdict) -> str:
    annotations = github.annotations(verdict, Path("/repo"))
    return "\n".join([github.summary(verdict), *annotations]) + "\n"


RENDERERS: dict[str, Callable[[Verdict], str]] = {
    "terminal.txt": in_terminal,
    "lines.txt": in_lines,
    "github.md": in_github,
    "junit.xml": junit.render,
}


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("name", VERDICTS)
def test_a_report_is_as_recorded(name: str, renderer: str) -> None:
    text = RENDERERS[renderer](VERDICTS[name]())
    assert text == recorded(GOLDEN / f"{name}_{renderer}", text)


def do_first() -> Iterator[str]:
    """Ranks that are known to be wrong, or not; a line, also of a file of which a program has several, or none."""
    lead = samples.LEAD.model_copy(update={"line": samples.LINE})
    package = samples.LINE.model_copy(update={"file": "/app/conf/__init__.py"})
    for update in ({}, {"line": package}, {"is_rank_known": False}, {"ranks": (), "line": None}):
        yield from wording.do_first_lines(lead.model_copy(update=update))


def of_ranks() -> Iterator[str]:
    """Which ranks are equal: in many groups, and on many hosts."""
    for verdict in (of_many("tp 1 of all", 256), of_many("one of a group", 256), of_several_faults(128)):
        yield from (text for text, _ in equal_ranks(verdict))


def of_guard() -> Iterator[str]:
    """The guard that explains a collective."""
    yield wording.guard_line(diagnose([DATA / "jobs" / "torch-2.13.0" / "reduce_op"]))


def of_progress() -> Iterator[str]:
    """Ranks that run, compile, start, have no process yet, and have ended."""
    statuses = [status(0), status(1, "compiling 0/0"), status(2, "compiling 0/0")]
    yield progress_line(statuses, 4, 12.4, starting={3: "imports torch"})
    yield progress_line([], 2, 2.0, starting={0: "waits for the other ranks"})
    yield progress_line([status(0, "finished"), status(1, "failed")], 2, 30.0, starting={})


LINES = {"do_first": do_first, "guard": of_guard, "equal_ranks": of_ranks, "progress": of_progress}


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_is_not_only_part_of_a_report_is_as_recorded(name: str) -> None:
    text = "".join(f"{line}\n" for line in LINES[name]())
    assert text == recorded(GOLDEN / f"line_{name}.txt", text)
