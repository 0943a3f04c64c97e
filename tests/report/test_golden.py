"""What each renderer prints, whole: the one place where the sentences of a report are pinned.

Record again with UPDATE_GOLDEN=1 pytest tests/report/test_golden.py, and read the diff.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.evidence.samples import broken, call, compiled, counters, guard, line, record, reduce, tensor
from tests.report import samples
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.verdict import Absent, capture_rules, conclude, fetch_from
from tpcompile.evidence.records import CompileRecord, RankRecord, Verdict
from tpcompile.report import github, junit, lines, terminal

GOLDEN = Path(__file__).parent.parent / "data" / "reports"


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


VERDICTS: dict[str, Callable[[], Verdict]] = {
    "failing": samples.failing,
    "passing": samples.passing,
    "recompiled": recompiled,
    "broke": broke,
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
    golden = GOLDEN / f"{name}_{renderer}"
    text = RENDERERS[renderer](VERDICTS[name]())
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
