"""Runs of all ranks beside one device -> right, or what is wrong and the op that it begins with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from tpcompile.evidence.records import UserLine, WrongOp
from tpcompile.evidence.records.wrong_op import earliest
from tpcompile.evidence.text.lines import is_library_file, line_at
from tpcompile.numerics.judged import LOOKUPS, Judged, Known, Total, as_text, sums_over_ranks
from tpcompile.numerics.judging import all_judged
from tpcompile.numerics.op_names import COLLECTIVES, MASKS, SAME_VALUES
from tpcompile.numerics.rows import Rows, unequal_cuts
from tpcompile.numerics.trace import Trace, Value
from tpcompile.numerics.traced import traced_call
from tpcompile.numerics.wrong_op import first_wrong_op, tolerance_of
from tpcompile.torch_api.watching import frames_from
from tpcompile.typecheck.assembly import WHOLE, possible
from tpcompile.typecheck.layouts import Choice, Layouts
from tpcompile.typecheck.program import NotComparable, Program, Run
from tpcompile.typecheck.report import DRAWN, Numbers

_LEAST_ERROR = 1e-6
_ROUNDINGS = 32
"""Times the precision of the coarsest dtype of a run by which equal values may differ."""
_KEEPS_ROWS = MASKS | SAME_VALUES | {"aten.mul"}
_SMALL = 1e-3
"""Norm of an output below which it is small: its digits are rounding."""
_MOST_S = 20.0
"""Seconds for trying layouts."""
_MOST_TRACED = 24
"""Layouts of which the one with the fewest wrong values is taken, where nothing is right."""
_OWN = f"{Path(__file__).parent}/"
_RUNS = str(Path(__file__).with_name("program.py"))
_MOVES = SAME_VALUES | {"aten.cat", "aten.stack", "aten.copy_"}


@dataclass(frozen=True)
class Expected:
    """What the caller of the program passes and expects."""

    output_types: Sequence[str | None] | str | None = "I"
    parameter_types: Mapping[str, str] = field(default_factory=dict)

    def output(self, number: int) -> str:
        """The type of an output."""
        if self.output_types is None or isinstance(self.output_types, str):
            return self.output_types or ""
        return self.output_types[number] or ""


@dataclass(frozen=True)
class Beside:
    """The runs of all ranks."""

    runs: Sequence[Run]
    traces: Sequence[Trace]
    layouts: Layouts
    expected: Expected
    tolerance: float
    texts: Sequence[str]
    """The traces, as `sums_over_ranks` reads them."""

    def wrong_outputs(self, one: Run) -> list[str]:
        """Names of outputs that are not those of one device."""
        names = list(one.outputs)
        if any(list(run.outputs) != names for run in self.runs):
            raise NotComparable("the ranks and one device return different numbers of tensors")
        return [name for number, name in enumerate(names) if not self._is_right_output(name, number, one.outputs[name])]

    def _is_right_output(self, name: str, number: int, wanted: Tensor) -> bool:
        got = [run.outputs[name] for run in self.runs]
        type_ = self.expected.output(number)
        if type_.startswith("P"):
            return self._is_near(torch.stack(got).sum(0), wanted)
        ways = possible(tuple(wanted.shape), [tuple(each.shape) for each in got])
        if not ways:
            raise NotComparable(
                f"{name} has shape {tuple(got[0].shape)} on a rank, {tuple(wanted.shape)} on one device"
            )
        if type_ in ("", "V") or type_.startswith("V("):
            return any(
                self._are_near(got, [way.part(wanted, rank) for rank in range(len(got))], least=_SMALL) for way in ways
            )
        return all(each.shape == wanted.shape and self._is_near(each, wanted) for each in got)

    def wrong_gradients(self, one: Run, choice: Choice) -> list[str]:
        """Names of parameters and inputs whose gradients are not those of one device."""
        # One that is zero but for rounding, as of a bias that a softmax takes out, has no digits of its own.
        least = max((float(grad.norm()) for grad in one.grads.values() if grad is not None), default=0.0)
        found = one.grads.items()
        return [name for name, grad in found if not self._is_right_gradient(name, grad, choice, least=least)]

    def _is_right_gradient(self, name: str, wanted: Tensor | None, choice: Choice, *, least: float) -> bool:
        got = [run.grads.get(name) for run in self.runs]
        known = next((grad for grad in (wanted, *got) if grad is not None), None)
        if known is None:
            return True
        layout = choice.get(name, WHOLE)
        full = wanted if wanted is not None else known.new_zeros(self.layouts.shapes.get(name, tuple(known.shape)))
        parts = [layout.part(full, rank) for rank in range(len(got))]
        own = [torch.zeros_like(part) if grad is None else grad for grad, part in zip(got, parts, strict=True)]
        if any(grad.shape != part.shape for grad, part in zip(own, parts, strict=True)):
            return True  # an input of which a rank has a part
        if name in self.layouts.summed:
            return self._is_near(torch.stack(own).sum(0), full, least=least)
        ways = [own]
        if not layout.is_whole:  # of heads that several ranks hold the gradients may be summed over these
            summed = layout.summed(own, tuple(full.shape))
            ways.append([layout.part(summed, rank) for rank in range(len(own))])
        return any(self._are_near(way, parts, least=least) for way in ways)

    def _are_near(self, got: Sequence[Tensor], wanted: Sequence[Tensor], *, least: float) -> bool:
        return all(self._is_near(one, other, least=least) for one, other in zip(got, wanted, strict=True))

    def _is_near(self, got: Tensor, wanted: Tensor, *, least: float = _SMALL) -> bool:
        if not wanted.is_floating_point():
            return torch.equal(got, wanted)
        is_finite = wanted.isfinite()
        if not torch.equal(got[~is_finite], wanted[~is_finite]):  # NaN is equal to nothing
            return False
        got, wanted = got[is_finite], wanted[is_finite]
        return bool((got - wanted).norm() <= self.tolerance * max(float(wanted.norm()), least))


def judged_beside(
    program: Program, layouts: Layouts, runs: Sequence[tuple[Run, Trace]], expected: Expected, *, grads: bool
) -> Numbers:
    """The ranks beside the program on one device, in the layouts with which they return the same.

    Raises NotComparable.
    """
    traces = [trace for _, trace in runs]
    unit = max((value.unit for trace in traces for value in trace.values), default=0.0)
    tolerance = max(_LEAST_ERROR, _ROUNDINGS * unit)
    texts = list(map(as_text, traces))
    beside = Beside([run for run, _ in runs], traces, layouts, expected, tolerance, texts)
    choice, wrong = _first_right(program, beside)
    ungraded: tuple[str, ...] = ()
    if not wrong and grads:
        program.reset()
        one = program.run(grads=True)
        wrong = [f"grad {name}" for name in beside.wrong_gradients(one, choice)]
        ungraded = tuple(name for name, grad in one.grads.items() if grad is None)
    if not wrong and (place := _drawn_differently(program, beside, choice)) is not None:
        value = traces[0].values[place]
        drawn = WrongOp(about=value.name, line=value.line, module=value.module, place=place)
        return Numbers(wrong=(DRAWN,), op=drawn, ranks=tuple(range(len(runs))), with_gradients=grads)
    if not wrong:
        is_recorded = any(len({value.node for value in trace.values}) > 1 for trace in traces)
        return Numbers(is_right=True, with_gradients=grads, ungraded=ungraded if is_recorded else ())
    op, ranks = _wrong_op(program, beside, choice, wrong, grads=grads)
    return Numbers(wrong=tuple(wrong), op=op, ranks=ranks, with_gradients=grads)


def _drawn_differently(program: Program, beside: Beside, choice: Choice) -> int | None:
    """The first op of rank 0 that applies random numbers of its own to what is no part of a rank; None for none."""
    seeds = [tuple(seed for _, seed in run.drawn) for run in beside.runs]
    if len({len(each) for each in seeds}) > 1 or len(set(seeds)) == 1:
        return None
    results = beside.traces[0].results
    own = [place for place, of_ranks in enumerate(zip(*seeds, strict=True)) if len(set(of_ranks)) > 1]
    noise = [results[f"drawn {place}"] for place in own if f"drawn {place}" in results]
    search = _Search.of(program, beside, choice, grads=False, rank=0)
    values, judged = search.trace.values, search.judged(len(beside.runs))
    # The first that applies it to a value that all hold alike, or hold a summand of: a part of a rank has its own mask.
    found = [_used(place, values, judged) for place in noise]
    return min((place for place in found if place is not None), default=None)


def _used(place: int, values: Sequence[Value], judged: Sequence[Judged]) -> int | None:
    """The first op that gives the drawn numbers to a value that is no part of a rank; None for one that is."""
    drawn = {place}
    for number in range(place + 1, len(values)):
        sources = set(values[number].sources)
        if sources.isdisjoint(drawn):
            continue
        others = sources - drawn
        if not others:
            drawn.add(number)
            continue
        return None if all(judged[other] == Judged.PART for other in others) else number
    return None


def _first_right(program: Program, beside: Beside) -> tuple[Choice, list[str]]:
    """The first layouts with which all outputs are right, else those with which most is, and what is wrong then."""
    found: list[tuple[Choice, list[str]]] = []
    end = time.monotonic() + _MOST_S
    for choice in beside.layouts.choices():
        program.load(beside.layouts.full(choice))
        program.reset()
        wrong = beside.wrong_outputs(program.run())
        if not wrong:
            return choice, []
        found.append((choice, wrong))
        if time.monotonic() > end:
            break
    if len(found) == 1:
        return found[0]

    def num_wrong(tried: tuple[Choice, list[str]]) -> int:
        """Values of the first rank that one device does not have in these layouts."""
        search = _Search.of(program, beside, tried[0], grads=False, rank=0)
        return search.judged(len(beside.runs)).count(Judged.WRONG)

    return min(found[:_MOST_TRACED], key=num_wrong)


@dataclass(frozen=True)
class _Search:
    """What one rank has, and one device in certain layouts."""

    trace: Trace
    known: Known
    sums: Sequence[Total | None]
    rows: Mapping[str, Rows]

    @classmethod
    def of(cls, program: Program, beside: Beside, choice: Choice, *, grads: bool, rank: int) -> _Search:
        """Run the program on one device."""
        layouts, size = beside.layouts, len(beside.runs)
        cut = {name: layout for name, layout in choice.items() if not layout.is_whole}
        rows = {
            name: Rows(layout.dim, layout.rows[rank], layouts.shapes[name][layout.dim]) for name, layout in cut.items()
        }
        program.load(layouts.full(choice))
        cuts = unequal_cuts(rows.values(), rank=rank, size=size)
        _, reference = traced_run(program, grads=grads, size=size, cuts=cuts)
        return cls(beside.traces[rank], Known.of([reference]), sums_over_ranks(beside.texts, rank=rank), rows)

    def judged(self, size: int) -> Sequence[Judged]:
        """How each value of rank 0 is right."""
        return all_judged(
            self.trace.values, self.known, self.sums, tolerance=tolerance_of(torch.float64), rank=0, size=size,
            right=self.rows,
        ).judged  # fmt: skip


def _wrong_op(
    program: Program, beside: Beside, choice: Choice, wrong: Sequence[str], *, grads: bool
) -> tuple[WrongOp | None, tuple[int, ...]]:
    """The op that what is wrong begins with, and the ranks that have it."""
    size = len(beside.runs)
    found = {}
    for rank, trace in enumerate(beside.traces):
        search = _Search.of(program, beside, choice, grads=grads, rank=rank)
        start = [trace.results[name] for name in wrong if name in trace.results]
        op = first_wrong_op(
            trace, [start], search.known, search.sums, dtype=torch.float64, rank=rank, size=size, right=search.rows
        )
        if op is not None:
            found[rank] = _begun(op, trace.values)
            continue
        # The op that made the first of the wrong results: nothing is known of what it was given.
        place = _with_line(min(start, default=len(trace.values) - 1), trace.values)
        value = trace.values[place]
        found[rank] = WrongOp(about=value.name, line=value.line, module=value.module, place=place, got=value.shown)
    return earliest(found) or (None, ())


def _begun(op: WrongOp, values: Sequence[Value]) -> WrongOp:
    """The op with the line where its numbers begin.

    A mask of what was looked up is right or wrong with the numbers that were looked up; and what the program has
    computed of nothing that it was given begins with the first of its ops.
    """
    if op.in_backward:
        return op
    place = _looked_up(op.place, values)
    behind = _behind(place, values)
    if not any(values[each].is_given for each in behind):
        place = min(behind)
    place = _with_line(place, values)
    line = values[place].line
    return op if line is None else op.model_copy(update={"line": line, "module": values[place].module})


def _with_line(place: int, values: Sequence[Value]) -> int:
    """The value, or where no line made it, what it is a copy of."""
    while values[place].line is None and values[place].sources:
        place = values[place].sources[0]
    return place


def _looked_up(place: int, values: Sequence[Value]) -> int:
    """The look-up of which a value is a view or a masked copy; else the value itself."""
    now = place
    while values[now].name in _KEEPS_ROWS and values[now].sources:
        now = values[now].sources[0]
    return now if values[now].name in LOOKUPS else place


def _behind(place: int, values: Sequence[Value]) -> set[int]:
    found: set[int] = set()
    left = [place]
    while left:
        now = left.pop()
        if now not in found:
            found.add(now)
            left += values[now].sources
    return found


def traced_run(program: Program, *, grads: bool, size: int = 1, cuts: Sequence = ()) -> tuple[Run, Trace]:
    """One run of the program, and all that its ops returned."""
    runs: list[Run] = []
    program.reset()

    def call() -> Mapping[str, Tensor]:
        runs.append(program.run(grads=grads))
        return runs[0].named

    trace = traced_call(call, program.module, size=size, cuts=cuts, line_of=line_in_module)
    return runs[0], trace


def line_in_module(name: str, frame: FrameType) -> UserLine:
    """The innermost line of the user's; for a collective, and what takes apart or puts together, that of a module.

    A helper that gathers is right by itself: what is wrong is where it is used. A line of this package where the user
    has none.
    """
    within = takewhile(lambda each: each.f_code.co_filename != _RUNS, frames_from(frame))
    others = [each for each in within if not each.f_code.co_filename.startswith(_OWN)]
    frames = [each for each in others if not is_library_file(each.f_code.co_filename)]
    if not frames:
        return UserLine(file=_RUNS, line=0)
    found = frames[0]
    if name.startswith(COLLECTIVES) or name in _MOVES:
        found = next((each for each in frames if isinstance(each.f_locals.get("self"), torch.nn.Module)), found)
    return line_at(found, found.f_lineno)
