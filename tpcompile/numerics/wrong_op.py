"""A wrong run and its single-device references -> the op that its wrong numbers begin with, and the kind of mistake.

From a wrong output the search goes back through what is wrong, to the ops that were given nothing wrong. So what the
reference does not have (a packed projection of other widths, a partial sum) is not blamed where what is made of it is
right again. Of several such ops the first in the order of execution is the finding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.evidence.records import MistakeKind, WrongOp
from tpcompile.numerics.agree import texts_of_all_ranks
from tpcompile.numerics.fingerprints import Fingerprint
from tpcompile.numerics.judged import (
    ROUNDINGS,
    Judged,
    Known,
    Total,
    all_behind,
    allowed_for,
    as_text,
    behind,
    is_near,
    of_gradients,
    sums_over_ranks,
    times,
    totals_as_text,
)
from tpcompile.numerics.judged_run import Evidence
from tpcompile.numerics.judging import all_judged
from tpcompile.numerics.mistakes import described, gradient_cut
from tpcompile.numerics.op_names import may_move
from tpcompile.numerics.optimizer_step import plain_name
from tpcompile.numerics.recut import recut_as, recuts_of
from tpcompile.numerics.rows import Cut, Rows, all_rows, of_unknown_rows, unequal_cuts
from tpcompile.numerics.trace import Axis, Change, Trace
from tpcompile.numerics.traced import traced, traced_call
from tpcompile.numerics.trials import Trials
from tpcompile.torch_api.dispatch import local_part

_LEAST = 1e-5
_ROUNDED_APART = 10
"""Times the tolerance by which results of the program on one rank may differ from the reference's: an optimizer's step
makes more of a rounding."""
_COARSE = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_MAY_BE_OTHERWISE = {
    MistakeKind.UNKNOWN, MistakeKind.LOCAL_STATISTIC, MistakeKind.MASKED, MistakeKind.ORDER, MistakeKind.MULTIPLE,
}  # fmt: skip
"""Kinds that a value has which something before it has made wrong: a run that is repaired says more."""

_MAY_BE_ROWS = {MistakeKind.CUT_AS_ONE, MistakeKind.OTHER_PART, MistakeKind.LATE, MistakeKind.LEFT_OUT}
"""Kinds that an op has, too, which was given a parameter with the rows of a different rank."""


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest relative distance of equal values."""
    return max(ROUNDINGS * torch.finfo(dtype).eps, _LEAST)


@dataclass(frozen=True)
class Run:
    """A call to be traced, forward and backward; it returns tensors by name."""

    call: Callable[[], Mapping[str, Tensor]]
    module: nn.Module | None
    """Names the parameters, and the modules that run."""


def wrong_op_of(
    run: Run,
    references: Sequence[Run],
    wrong: Collection[str],
    group: dist.ProcessGroup | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_one_rank: Callable[[], AbstractContextManager[Run | None]] = nullcontext,
    axes: Sequence[Axis] = (),
) -> WrongOp | None:
    """The op that the wrong ones among the results of a run begin with; None when unknown.

    `wrong` are names of results. `references` return the same in the dtype under test and, last, in float64.
    `on_one_rank` makes the program as it is for one rank, after the run of all: it counts where its results are right.
    `axes` are the other ones of the mesh. All ranks of the group, and of a mesh, must call it, also one whose results
    are right.
    """
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    began_s = time.monotonic()
    trace = traced_call(run.call, run.module)
    sums = sums_over_ranks(texts_of_all_ranks(as_text(trace), group, device), rank=rank)
    sums = _with_other_axes(sums, trace, axes, device, size=size)
    layouts, unknown = _layouts(run.module, references[0].module, rank=rank, size=size)
    cuts = {**unknown, **layouts}
    unequal = unequal_cuts(layouts.values(), rank=rank, size=size)
    if max((value.unit for value in trace.values), default=0.0) <= torch.finfo(torch.float32).eps:
        references = references[-1:]  # a run in float32 is no nearer to this one than the exact one is
    singles = [traced_call(each.call, each.module, size=size, cuts=unequal, axes=axes) for each in references]
    with on_one_rank() as own:
        twin = None if own is None else _twin(own, singles[-1], cuts=unequal, axes=axes, dtype=dtype, size=size)
    padded = {len(cut.index) for cut in unequal if cut.has_padding}
    known = Known.of(singles, twin=twin, padded=padded, axes=[axis.size for axis in axes])
    starts = [[trace.results[name] for name in wrong if name in trace.results]]
    gradients = of_gradients(trace.values)
    forward = {name: at for name, at in trace.results.items() if at not in gradients}
    of_wrong = all_behind([at for name, at in forward.items() if name in wrong], trace.values)
    of_right = all_behind([at for name, at in forward.items() if name not in wrong], trace.values) - of_wrong
    found = first_wrong_op(
        trace, starts, known, sums, dtype=dtype, rank=rank, size=size, right=layouts, of_right=of_right
    )
    in_own_dtype = [value.unit for single in singles[:-1] for value in single.values]
    rounded = coarser(trace, starts[0], than=max(torch.finfo(dtype).eps, *in_own_dtype, 0.0))
    among = dist.group.WORLD if axes else group
    # All ranks try, or none: along another axis of a mesh they wait for each other.
    if group is None or "no" in texts_of_all_ranks("yes" if sums else "no", among, device):
        return found or rounded
    mine = [name for name in wrong if name in trace.results]
    is_open = bool(mine) and (found is None or (found.kind in _MAY_BE_OTHERWISE and not found.is_given))
    trials = Trials(
        trace,
        lambda change, around: _again(run, change, around),
        known,
        group,
        tolerance=tolerance_of(dtype),
        device=device,
        among=among,
        limit_s=time.monotonic() - began_s,
        recuts=recuts_of(cuts, rank=rank, size=size),
        recut=lambda recut: recut_as(run.module, references[0].module, recut, cuts),
    )
    may_be_rows = found is not None and found.kind in _MAY_BE_ROWS
    repaired = trials.repaired(mine, is_open=is_open, may_be_rows=may_be_rows)
    return repaired or found or rounded


def _with_other_axes(
    sums: Sequence[Total | None], trace: Trace, axes: Sequence[Axis], device: torch.device, *, size: int
) -> list[Total | None]:
    """The totals, with the sums along each other axis of the mesh, and along several. All ranks must call it.

    Without sums of what the ranks of an axis hold alike: those are multiples, not what is put together of summands.
    """
    found: list[tuple[list[Total | None], int]] = []
    texts = [(as_text(trace), 1), (totals_as_text(trace, sums), size)]
    for axis in axes:
        for text, num_ranks in tuple(texts):
            along = sums_over_ranks(texts_of_all_ranks(text, axis.group, device), rank=axis.at)
            found.append((along, num_ranks * axis.size))
            texts.append((totals_as_text(trace, along), num_ranks * axis.size))

    def elsewhere(place: int, total: Total) -> tuple[tuple[Fingerprint, int], ...]:
        totals = ((along[place], num_ranks) for along, num_ranks in found if along)
        simpler = [(trace.values[place].tensor or (), 1), (total.sum, size)]
        known = [(total.sum, num_ranks) for total, num_ranks in totals if total is not None]
        return tuple(one for one in known if not any(_is_multiple(one, other) for other in (*simpler, *known)))

    return [total and total._replace(elsewhere=elsewhere(place, total)) for place, total in enumerate(sums)]


def _is_multiple(total: tuple[Fingerprint, int], other: tuple[Fingerprint, int]) -> bool:
    """True for a sum over more ranks than the other one, which they all hold."""
    (numbers, num_ranks), (part, num_others) = total, other
    return num_ranks > num_others and is_near(numbers, times(part, num_ranks / num_others), _LEAST)


def _with_order(place: int, results: Sequence[int], found: Evidence) -> int:
    """The place, or the first in another order of what a result was made from, where that is in another order.

    An op that moves nothing does not begin it: a program may hold its rows in an order of its own, and has to restore
    that of the reference.
    """
    if may_move(found.values[found.made_at(place)].name):
        return place
    first = (found.first_in_other_order(result) for result in results)
    return next((each for each in first if each is not None), place)


def _twin(
    run: Run, exact: Trace, *, cuts: Sequence[Cut], axes: Sequence[Axis], dtype: torch.dtype, size: int
) -> Trace | None:
    """The trace of the program on one rank; None where it raises, or returns anything else than the reference."""
    try:
        trace = traced_call(run.call, run.module, size=size, cuts=cuts, axes=axes)
    except Exception:  # of the program, which may be for several ranks only
        return None
    if not trace.results or not trace.results.keys() <= exact.results.keys():  # an optimizer by hand keeps less
        return None
    tolerance = _ROUNDED_APART * tolerance_of(dtype)
    for name, place in trace.results.items():
        own, wanted = trace.values[place], exact.values[exact.results[name]]
        if own.tensor is None or wanted.tensor is None or own.shape != wanted.shape:
            return None
        if not is_near(own.tensor, wanted.tensor, allowed_for(own, tolerance)):
            return None
    return trace


def coarser(trace: Trace, wrong: Iterable[int], *, than: float) -> WrongOp | None:
    """The first op behind wrong results whose dtype has a larger unit in the last place; None where there is none.

    For a run of which each value is right, in view of the dtypes that it was made in, and `than`, the largest unit of
    the reference.
    """
    for place in sorted(all_behind(wrong, trace.values)):
        value = trace.values[place]
        if value.unit > than and all(trace.values[source].unit <= than for source in value.sources):
            names = [str(each).removeprefix("torch.") for each in _COARSE if torch.finfo(each).eps == value.unit]
            return WrongOp(
                about=value.name, line=value.line, module=value.module, place=place, kind=MistakeKind.COARSER,
                of=" or ".join(names), in_backward=value.in_backward, is_given=value.is_given,
            )  # fmt: skip
    return None


def _again(run: Run, change: Change | None, around: AbstractContextManager[object]) -> Trace:
    with around:
        return traced_call(run.call, run.module, change=change)


def _layouts(
    own: nn.Module | None, reference: nn.Module | None, *, rank: int, size: int
) -> tuple[dict[str, Rows], dict[str, Rows]]:
    """Which rows of the reference's parameters the rank has, by their names, where it has not all; and those of which
    it is not known."""
    if own is None or reference is None:
        return {}, {}
    local, full = (
        {plain_name(name): local_part(each) for name, each in module.named_parameters()} for module in (own, reference)
    )
    cut = {name: each for name, each in local.items() if name in full and each.shape != full[name].shape}
    return all_rows(cut, full, rank=rank, size=size), of_unknown_rows(cut, full)


def wrong_op(
    stack: nn.Module,
    inputs: tuple[Any, ...],
    references: Sequence[tuple[nn.Module, tuple[Any, ...]]],
    module: str,
    comm: TpComm,
    *,
    dtype: torch.dtype,
) -> WrongOp | None:
    """The op that the wrong output of a module begins with; None when unknown. All ranks of the group must call it.

    `references` are the single-device modules with their inputs, in the dtype under test and in float64. A rank whose
    modules are right passes an empty name.
    """
    trace = traced(stack, inputs)
    device = next(stack.parameters()).device
    sums = sums_over_ranks(texts_of_all_ranks(as_text(trace), comm.group, device), rank=comm.rank)
    known = Known.of(traced(single, given, size=comm.size) for single, given in references)
    starts = [trace.outputs.get("", []), trace.outputs.get(module, [])]
    return first_wrong_op(trace, starts, known, sums, dtype=dtype, rank=comm.rank, size=comm.size)


def first_wrong_op(
    trace: Trace,
    starts: Sequence[Sequence[int]],
    known: Known,
    sums: Sequence[Total | None],
    *,
    dtype: torch.dtype,
    rank: int,
    size: int,
    right: Collection[str] = (),
    of_right: Collection[int] = (),
) -> WrongOp | None:
    """The first op, or tensor that was given, from which the wrong values among `starts` come; None when unknown.

    The first of the `starts` in which something is wrong counts. `right` names parameters that are right; `of_right`
    are places of what right results of the forward pass were made of.
    """
    tolerance = tolerance_of(dtype)
    found = all_judged(
        trace.values, known, sums, tolerance=tolerance, rank=rank, size=size, right=right, of_right=of_right
    )
    judged = found.judged
    for places in starts:
        divided = {found.divided_behind([place]) for place in places if judged[place].is_summand}
        unlike = {place for place in divided if found.given(place, Judged.WRONG)}  # a sum of what is wrong
        behind_it = [source for place in unlike for source in trace.values[place].sources]
        wrong = behind([*places, *behind_it], trace.values, judged, {Judged.WRONG})
        origins = {place for place in wrong if wrong.isdisjoint(trace.values[place].sources)}
        begins = origins | (divided - unlike) | (found.wrong_places_given(places) if wrong else set())
        if begins:
            return described(_with_order(min(begins), places, found), found, wrong)
    results = [place for places in starts for place in places]
    for place in results:
        if found.known.in_other_order(trace.values[place], tolerance):
            return described(place, found)
    cut = [gradient_cut(place, found) for place in results]
    return next(filter(None, cut), None)
