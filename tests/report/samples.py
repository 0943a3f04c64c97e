"""Verdicts that the report tests share."""

from __future__ import annotations

from tpcompile.evidence.records import (
    Check,
    Divergence,
    DivergenceClass,
    Layer,
    Lead,
    RankGroup,
    Status,
    Taint,
    UserLine,
    Verdict,
    value_item,
)
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.records.compile import TaintKind
from tpcompile.evidence.records.findings import Grade

LONG_CODE = (
    "y = all_reduce(self.scale * torch.nn.functional.silu(x_BSD) * (rank + 1), 'sum', self.tp_group)  # " + "z" * 40
)
LINE = UserLine(file="/repo/models/block.py", line=12, function="forward", code=LONG_CODE)
OTHER_LINE = UserLine(file="/repo/layout.py", line=34, function="stage", code="return rank // size")
LEAD = Lead(cause=Cause.RANK_CONSTANT, says="mul(%3, 1) / mul(%3, 8)", ranks=(7,), do_first="Keep it in a buffer.")


def check(name: str = "graphs", status: Status = Status.PASS, mode: str = "C", **fields: object) -> Check:
    """A check with default texts."""
    values = {"expected": "1 on every rank", "observed": "1 on ranks 0-7"} | fields
    return Check(name=name, mode=mode, status=status, **values)  # type: ignore[arg-type]  # pydantic checks them


def divergence(cls: DivergenceClass = DivergenceClass.CONTENT, **fields: object) -> Divergence:
    """Ranks 0-6 multiply by 1, rank 7 by 8."""
    values: dict[str, object] = {
        "layer": Layer.GRAPH,
        "domain": "tp",
        "where": "C/first, forward block.py:3",
        "groups": (
            RankGroup(ranks=tuple(range(7)), item=value_item("%4", "mul(%3, 1) -> f32[8, 16][16, 1]cpu", line=LINE)),
            RankGroup(ranks=(7,), item=value_item("%4", "mul(%3, 8) -> f32[8, 16][16, 1]cpu", line=LINE)),
        ),
        "title": "argument 2 of node 4 (mul) is 1 on ranks 0-6 and 8 on rank 7",
        "advice": "make the constant a buffer, or declare it under gate.allow",
    }
    return Divergence(cls=cls, **(values | fields))  # type: ignore[arg-type]  # pydantic checks them


def taint(text: str) -> Taint:
    return Taint(what="guard", kind=TaintKind.DIFFERS, grade=Grade.CERTAIN, text=text, line=LINE)


def failing() -> Verdict:
    """Mode C, 8 ranks, one rank constant and one accepted difference."""
    passed = check(name="compiled", expected="at least 1 graph", observed="1 graph on every rank")
    equal = check(
        name="graph layer equal",
        status=Status.FAIL,
        expected="1 group of ranks",
        observed="0-6 | 7",
        ranks=(7,),
        line=LINE,
        details=("f32[8, 16] stays [bold]as it is[/bold]",),
    )
    skipped = check(name="gradients", status=Status.SKIPPED, expected="within 2.5x", observed="forward only")
    parametric = divergence(
        DivergenceClass.RANK_PARAMETRIC,
        layer=Layer.LOWERED,
        title="lt(view, 0 | 128) follows the rank",
        advice="vocabulary shard",
        groups=(RankGroup(ranks=(0,)), RankGroup(ranks=tuple(range(1, 8)))),
    )
    return Verdict(
        status=Status.FAIL,
        exit_code=1,
        world_size=8,
        preset="wan14b",
        modes=("C",),
        summary="rank 7 compiled another graph: mul(%3, 8) instead of mul(%3, 1) at block.py:12",
        checks=(passed, equal, skipped),
        divergences=(divergence(), parametric),
        timings_ms={"C": 6.336},
        domains={"tp": (tuple(range(7)), (7,))},
    )


def passing() -> Verdict:
    """Mode C, 2 ranks, all green."""
    return Verdict(
        status=Status.PASS,
        exit_code=0,
        world_size=2,
        preset="cpu_smoke",
        modes=("C",),
        summary="2 ranks compiled the same graph, 0 breaks",
        checks=(check(observed="1 on ranks 0-1"), check(name="breaks", expected="0", observed="0")),
        domains={"tp": ((0, 1),)},
    )
