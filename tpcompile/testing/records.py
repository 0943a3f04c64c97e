"""What a comparison found, as frozen records: JSON in, JSON out, and one text for whoever has to fix it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import PlainSerializer

from tpcompile.errors import DivergenceError
from tpcompile.evidence.records import Frozen
from tpcompile.evidence.text.ranks import ranks_text

SCHEMA_VERSION = 1
_MAX_LINES = 20


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


Number = Annotated[float, PlainSerializer(_finite, when_used="json")]
"""A float whose `inf` and `nan` are strings in JSON, which has no spelling for them."""


class TensorError(Frozen):
    """One output or gradient of one rank against its slice of the twin's."""

    name: str
    """`forward`, `forward.1`, `grad input`, `grad PARAMETER`."""
    error: Number
    """Relative error against float64, in the norm of the tensor."""
    single: Number
    """The same error of the single-device module in the same dtype."""
    ratio: Number
    """`error` as a multiple of `single` (or of a quarter ulp, if larger); of more for fewer than 64 numbers."""
    exact: bool = False
    """Whether the tensor has to be the single-device one bit for bit."""
    differs: bool = False
    """Whether it had to be, and is not."""

    def is_right(self, limit: float) -> bool:
        """Within the limit, and equal where that was asked for; NaN is never right."""
        return not self.differs and self.ratio <= limit

    def text(self, limit: float) -> str:
        """The numbers, for a person."""
        if math.isinf(self.ratio) and self.error == 1 and self.single == 0:
            return "missing: this run made none"
        numbers = f"error {self.error:.2e}, single device {self.single:.2e}, ratio {self.ratio:.3g} (limit {limit:g})"
        return f"not bit for bit the single-device value; {numbers}" if self.differs else numbers


class ProgramReport(Frozen):
    """One way to run the module, on one rank."""

    rank: int
    """Place in the group."""
    strategy: str
    """Class that issued the collectives."""
    program: str
    """`eager`, or the backend of torch.compile."""
    dtype: str
    tensors: tuple[TensorError, ...]
    collectives: tuple[str, ...] = ()
    """As issued: by eager code, or in the compiled forward and backward graphs."""
    wrong_order: str = ""
    """First position at which collectives and declaration differ; empty when they agree or nothing was declared."""
    graphs: int = 0
    """Graphs that were compiled."""
    breaks: int = 0
    """Graph breaks."""
    first_wrong: str = ""
    """Where wrong numbers begin, when the eager forward is wrong."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What ranks have in common."""
        return self.strategy, self.program, self.dtype

    def failures(self, limit: float) -> dict[str, str]:
        """What is wrong -> how; empty when nothing is."""
        found = {t.name: t.text(limit) for t in self.tensors if not t.is_right(limit)}
        if self.wrong_order:
            found["collectives"] = self.wrong_order
        if self.program != "eager" and not self.graphs:
            found["compile"] = "nothing was compiled, so nothing is proved about compiled code"
        return found


class TwinReport(Frozen):
    """A module against its single-device twin: every program on every rank."""

    schema_version: int = SCHEMA_VERSION
    name: str
    tp: int
    torch: str
    """Version."""
    seed: int
    values: str
    limit: float
    programs: tuple[ProgramReport, ...]

    @property
    def passed(self) -> bool:
        """No program of any rank is wrong."""
        return not any(program.failures(self.limit) for program in self.programs)

    @property
    def worst(self) -> tuple[str, TensorError]:
        """The program and tensor with the largest ratio; NaN is larger than any."""
        found = [(_label(p), t) for p in self.programs for t in p.tensors]
        return max(found, key=lambda pair: math.inf if math.isnan(pair[1].ratio) else pair[1].ratio)

    def text(self) -> str:
        """One line per wrong tensor and program, with the ranks it is wrong on and the numbers of the worst."""
        lines = self._failure_lines()
        if not lines:
            label, tensor = self.worst
            return (
                f"{self.name} on {self.tp} ranks: {len(self.programs)} runs agree with the single-device twin; worst: "
                + (f"{tensor.name} ({label}), {tensor.text(self.limit)}")
            )
        head = f"{self.name} on {self.tp} ranks is not its single-device twin, {len(lines)} findings:"
        more = [f"  and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
        begins = sorted({p.first_wrong for p in self.programs if p.first_wrong})
        return "\n".join([head, *lines[:_MAX_LINES], *more, *(f"  wrong numbers begin in {name}" for name in begins)])

    def raise_on_failure(self) -> None:
        """Raise DivergenceError with `text()` unless everything is right; on all ranks alike."""
        if not self.passed:
            raise DivergenceError(self.text())

    def _failure_lines(self) -> list[str]:
        found: dict[tuple[tuple[str, str, str], str], list[tuple[ProgramReport, str]]] = {}
        for program in self.programs:
            for what, how in program.failures(self.limit).items():
                found.setdefault((program.key, what), []).append((program, how))
        return [f"  {what} | {', '.join(key)} | {_worst(pairs, what)}" for (key, what), pairs in found.items()]


def _worst(pairs: Sequence[tuple[ProgramReport, str]], what: str) -> str:
    def ratio(pair: tuple[ProgramReport, str]) -> float:
        ratios = [t.ratio for t in pair[0].tensors if t.name == what]
        return math.inf if any(map(math.isnan, ratios)) else max(ratios, default=0)

    program, how = max(pairs, key=ratio)
    ranks = [p.rank for p, _ in pairs]
    others = f" (also on rank {ranks_text([r for r in ranks if r != program.rank])})" if len(ranks) > 1 else ""
    return f"rank {program.rank}{others} | {how}"


def _label(program: ProgramReport) -> str:
    return f"{', '.join(program.key)}, rank {program.rank}"
