"""Results of a comparison as frozen records: JSON in, JSON out, and one text for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tpcompile.errors import DivergenceError
from tpcompile.evidence.judgement.checks import undecided
from tpcompile.evidence.records import Frozen, WrongOp, earliest
from tpcompile.evidence.text.ranks import named_ranks

SCHEMA_VERSION = 1
_MAX_LINES = 20
"""Findings that a text lists; it counts the others."""


class TensorError(Frozen):
    """One output or gradient of one rank against its slice of the reference."""

    name: str
    """`forward`, `forward.1`, `grad input`, `grad PARAMETER`."""
    error: float
    """Relative error against float64, in the norm of the tensor."""
    single: float
    """The same error of the single-device module in the same dtype."""
    ratio: float
    """`error` as a multiple of `single` (or of a quarter ulp, if larger); of more for fewer than 64 numbers."""
    is_judged: bool = True
    """False where `single` is more than rounding: then the ratio says nothing."""
    exact: bool = False
    """The tensor has to be the single-device one bit for bit."""
    differs: bool = False
    """The tensor had to be exact, and is not."""

    def is_right(self, limit: float) -> bool:
        """True when the ratio is within the limit, and bits are equal where that was asked for; NaN is never right."""
        return not self.differs and self.ratio <= limit

    def text(self, limit: float) -> str:
        """The numbers, for a person."""
        if math.isinf(self.ratio) and self.error == 1 and self.single == 0:
            return "missing: this run made none"
        if not self.is_judged:
            return f"cannot be judged: on one device it is {self.single:.2g} away from float64, which is no rounding"
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
    """The collectives in the order in which eager code issued them, or in which the compiled graphs hold them."""
    wrong_order: str = ""
    """First position at which collectives and declaration differ; empty when they agree or nothing was declared."""
    graphs: int = 0
    """Graphs that were compiled."""
    breaks: int = 0
    """Graph breaks."""
    first_wrong: str = ""
    """The module in which wrong numbers begin, when the eager forward is wrong."""
    first_wrong_op: WrongOp | None = None
    """The op, or the parameter or buffer, that wrong outputs begin with, or else wrong gradients; None when unknown."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Strategy, program and dtype: equal for the reports of all ranks on one program."""
        return self.strategy, self.program, self.dtype

    def failures(self, limit: float) -> dict[str, str]:
        """Name of a wrong tensor, `collectives` or `compile` -> what is wrong with it; empty when nothing is."""
        found = {}
        open_ = undecided({tensor.name: tensor.is_judged for tensor in self.tensors})
        for tensor in self.tensors:
            if tensor.name in open_ or not tensor.is_right(limit):
                found[tensor.name] = tensor.text(limit)
        if self.wrong_order:
            found["collectives"] = self.wrong_order
        if self.program != "eager" and not self.graphs:
            found["compile"] = "nothing was compiled, so nothing is proved about compiled code"
        return found


class NumericsReport(Frozen):
    """A module against its single-device reference: every program on every rank."""

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
        """True when no program of any rank is wrong."""
        return not any(program.failures(self.limit) for program in self.programs)

    @property
    def worst(self) -> tuple[str, TensorError]:
        """The program and tensor with the largest ratio; NaN is larger than any."""
        found = [(f"{', '.join(p.key)}, rank {p.rank}", t) for p in self.programs for t in p.tensors]
        return max(found, key=lambda pair: math.inf if math.isnan(pair[1].ratio) else pair[1].ratio)

    def text(self) -> str:
        """One line per wrong tensor and program, with the ranks it is wrong on and the numbers of the worst."""
        subject = f"{self.name} on {self.tp} ranks"
        failures = self._failure_lines()
        if not failures:
            label, tensor = self.worst
            runs = f"{len(self.programs)} runs agree with the single-device reference"
            return f"{subject}: {runs}; worst: {tensor.name} ({label}), {tensor.text(self.limit)}"
        lines = [
            f"{subject} differs from the single-device reference, {len(failures)} findings:",
            *failures[:_MAX_LINES],
        ]
        if len(failures) > _MAX_LINES:
            lines.append(f"  and {len(failures) - _MAX_LINES} more")
        begins = {program.first_wrong for program in self.programs}
        begins.discard("")
        for name in sorted(begins):
            lines.append(f"  first wrong module: {name}")
        for op, ranks in self.wrong_ops:
            lines.append(f"  first wrong on {named_ranks(ranks)}: {op.text}")
        return "\n".join(lines)

    @property
    def wrong_ops(self) -> list[tuple[WrongOp, tuple[int, ...]]]:
        """For each program that is wrong in eager the op that it begins with, and the ranks that have it."""
        by_program: dict[tuple[str, str, str], dict[int, WrongOp]] = {}
        for program in self.programs:
            if program.first_wrong_op is not None:
                by_program.setdefault(program.key, {})[program.rank] = program.first_wrong_op
        return list(filter(None, map(earliest, by_program.values())))

    def __str__(self) -> str:
        return self.text()

    def raise_on_failure(self) -> None:
        """Raise DivergenceError with `text()` unless everything is right; on all ranks alike."""
        if not self.passed:
            raise DivergenceError(self.text())

    def _failure_lines(self) -> list[str]:
        found: dict[tuple[tuple[str, str, str], str], list[tuple[ProgramReport, str]]] = {}
        for program in self.programs:
            failures = program.failures(self.limit)
            for what, how in failures.items():
                key = (program.key, what)
                found.setdefault(key, []).append((program, how))
        lines = []
        for (names, what), pairs in found.items():
            lines.append(f"  {what} | {', '.join(names)} | {_worst(pairs, what)}")
        return lines


def _worst(pairs: Sequence[tuple[ProgramReport, str]], what: str) -> str:
    def ratio(pair: tuple[ProgramReport, str]) -> float:
        ratios = [t.ratio for t in pair[0].tensors if t.name == what]
        return math.inf if any(map(math.isnan, ratios)) else max(ratios, default=0)

    program, how = max(pairs, key=ratio)
    ranks = [p.rank for p, _ in pairs]
    others = [rank for rank in ranks if rank != program.rank]
    also = f" (also on {named_ranks(others)})" if len(ranks) > 1 else ""
    return f"rank {program.rank}{also} | {how}"
