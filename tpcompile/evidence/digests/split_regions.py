"""Counted regions and stacks of compiles -> compiled callables that do not run as one region, and why.

A graph break inside a loop, or a compile that fails, makes Dynamo skip that *code object* for the life of the
process. Every other instance of the class then runs region by region, with all graph-break counters at zero and with
`fullgraph=True` satisfied (pytorch 144820, 132923). It is detected by the number of regions that a call enters, and in
a trace by the frames of user code between the compiled callable and the compiled frame.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from tpcompile.evidence.iterables import first, grouped, last
from tpcompile.evidence.records import (
    Check,
    CheckId,
    CompileRecord,
    GraphBreak,
    RankDigest,
    RankRecord,
    RegionCount,
    SkippedFrame,
    SplitCall,
    Status,
    UserLine,
)
from tpcompile.evidence.records.base import at_text, known, lines_of
from tpcompile.evidence.text.lines import own_lines
from tpcompile.evidence.text.ranks import named_ranks

_WRAPPER, _WRAPPER_FILE = "compile_wrapper", "_dynamo/eval_frame.py"
_EXPECTED = "1 compiled region entered per call, on every rank"
_ADVICE = (
    "fullgraph=True does not help: Dynamo skips a code object for the life of the process, whichever instance broke "
    "its graph. Fix the line that broke it, or call torch.compiler.reset() after the call that did"
)

_ADVICE_ON_HOOKS = (
    "fullgraph=True does not help: torch.compile(module) calls hooks of the module itself outside of its graph. Put "
    "them on a submodule, or compile a function that calls the module"
)


def splits_of(record: RankRecord) -> tuple[SplitCall, ...]:
    """Compiled callables of one rank that entered more than one region in a call.

    Where regions were not counted, as in a trace file: those inside which a frame was compiled on its own.
    """
    compiles = record.compiles
    failed = filter(None, map(_failed_frame, compiles))
    skipped = (*record.skipped, *failed)
    if not record.regions:
        return tuple(_from_stacks(compiles, skipped))
    found = [_counted(count, compiles, skipped) for count in record.regions]
    return tuple(filter(None, found))


def runs_at(compile_: CompileRecord) -> UserLine | None:
    """The user's line below the compiled callable from which this frame was entered; None for the callable itself."""
    below = compile_.stack[len(_entry(compile_)) :]
    if len(below) == len(compile_.stack):
        return None  # the compiled callable is not on the stack
    return first(own_lines(below[:-1]))


def _entry(compile_: CompileRecord) -> tuple[UserLine, ...]:
    """The stack down to torch's wrapper of the compiled callable."""
    stack = compile_.stack
    for index in range(len(stack) - 1, -1, -1):
        if stack[index].function == _WRAPPER and stack[index].file.endswith(_WRAPPER_FILE):
            return stack[: index + 1]
    return ()


def skipped_frame(at: UserLine, failed: Iterable[SkippedFrame]) -> SkippedFrame | None:
    """The failed compile of the code object that a line runs in, if it is known."""
    same = [f for f in failed if _function(f.line) == _function(at) and f.line.line <= at.line]
    return max(same, key=lambda frame: frame.line.line, default=None)


def region_check(
    mode: str, digests: Sequence[RankDigest], *, phases: Iterable[str], accepted: Sequence[GraphBreak] = ()
) -> Check:
    """Check that every call of a compiled callable enters one region, apart from `accepted` graph breaks."""
    wanted = set(phases)
    # where they end a graph: their lines, and those of the calls that lead there
    lines = itertools.chain.from_iterable([*known([found.line]), *found.stack] for found in accepted)
    places = {(line.file, line.line) for line in lines}
    found: list[tuple[int, SplitCall]] = []
    splits: list[tuple[int, SplitCall]] = []
    for rank, split in _of_all(digests):
        at = split.broke_at or split.runs_at
        if split.phase in wanted:
            found.append((rank, split))
            if (at.file, at.line) not in places:
                splits.append((rank, split))
    if splits:
        _, worst = max(splits, key=lambda pair: pair[1].regions_per_call)
        return _check(mode, Status.FAIL, splits, worst)
    is_counted = any(digest.regions_counted for digest in digests)
    status, observed = (Status.PASS, "1") if is_counted else (Status.SKIPPED, "not counted")
    if found:
        most = max(split.regions_per_call for _, split in found)
        observed = f"{most}, at the expected graph breaks"
    return Check(
        id=CheckId.ONE_REGION,
        mode=mode,
        status=status,
        expected=_EXPECTED,
        observed=observed,
    )


def split_note(digests: Sequence[RankDigest]) -> list[Check]:
    """The same for a job's trace files, as information: a program may run in several regions by design."""
    splits = _of_all(digests)
    return [_check("", Status.INFO, splits, splits[0][1])] if splits else []


def _of_all(digests: Sequence[RankDigest]) -> list[tuple[int, SplitCall]]:
    """(rank, callable that it runs in several regions), of all ranks."""
    return [(digest.rank, split) for digest in digests for split in digest.splits]


def _check(mode: str, status: Status, splits: Sequence[tuple[int, SplitCall]], shown: SplitCall) -> Check:
    """A check over the callables that ranks run in several regions; `shown` is described in it."""
    ranks = tuple(dict(splits))
    number = f"{shown.regions_per_call} regions per call" if shown.regions_per_call else "several regions"
    return Check(
        id=CheckId.ONE_REGION,
        mode=mode,
        status=status,
        expected=_EXPECTED,
        observed=f"{number} on {named_ranks(ranks)}: {_why(shown)}",
        details=_details([split for _, split in splits]),
        ranks=ranks,
        line=shown.broke_at or shown.runs_at,
    )


def _failed_frame(compile_: CompileRecord) -> SkippedFrame | None:
    if compile_.line is None or compile_.graphs or not compile_.failure:
        return None
    broke_at = first([*lines_of(compile_.breaks), *known([compile_.failure_line])])
    return SkippedFrame(line=compile_.line, reason=compile_.failure, broke_at=broke_at)


def _counted(
    count: RegionCount, compiles: Sequence[CompileRecord], skipped: Sequence[SkippedFrame]
) -> SplitCall | None:
    """The callable, unless its calls enter only one region."""
    at = count.runs_at
    if count.most < 2:
        return None
    if at is None:
        return _entered_by_library(count, compiles, skipped)
    pieces = [compile_ for below, compile_ in _entered(compiles) if _function(below) == _function(at)]
    # the name of the target is qualified
    _, _, name = count.target.function.rpartition(".")
    is_inside = (count.target.file, name) == _function(at)
    return SplitCall(
        phase=count.phase,
        runs_at=at,
        name=count.target.function if is_inside else at.function,
        regions_per_call=count.most,
        pieces=_lines(pieces),
        skipped=skipped_frame(at, skipped),
    )


def _entered_by_library(
    count: RegionCount, compiles: Sequence[CompileRecord], skipped: Sequence[SkippedFrame]
) -> SplitCall:
    """The callable, where only code of torch runs between it and its regions."""
    target = (count.target.file, count.target.line)
    breaks: list[GraphBreak] = []
    calls: set[tuple[UserLine, ...]] = set()
    for compile_ in compiles:
        frame = last(compile_.stack)
        is_target = frame is not None and (frame.file, frame.line) == target  # of the user's code or of torch
        if is_target and compile_.phase == count.phase:
            breaks += compile_.breaks
        if compile_.line and (compile_.line.file, compile_.line.line) == target:
            calls.add(_entry(compile_))
    of_phase = [c for c in compiles if c.graphs and c.phase == count.phase]
    beside = [compile_ for compile_ in of_phase if runs_at(compile_) is None and _entry(compile_) in calls]
    return SplitCall(
        phase=count.phase,
        runs_at=count.target,
        is_in_library=True,
        name=count.target.function,
        regions_per_call=count.most,
        pieces=_lines(beside),
        skipped=skipped_frame(count.target, skipped),
        broken=first(breaks),
    )


def _from_stacks(compiles: Sequence[CompileRecord], skipped: Sequence[SkippedFrame]) -> Iterable[SplitCall]:
    """Functions that run in Python inside of a compiled callable, from the stacks of what was compiled in them."""
    with_graph = [pair for pair in _entered(compiles) if pair[1].graphs]
    by_function = grouped(with_graph, lambda pair: (pair[1].phase, *_function(pair[0])))
    for (phase, *_), pairs in by_function.items():
        at, _ = pairs[0]
        yield SplitCall(
            phase=phase,
            runs_at=at,
            name=at.function,
            pieces=_lines(compile_ for _, compile_ in pairs),
            skipped=skipped_frame(at, skipped),
        )


def _entered(compiles: Iterable[CompileRecord]) -> Iterator[tuple[UserLine, CompileRecord]]:
    """Compiles that were entered from code that runs in Python, each with the line there."""
    for compile_ in compiles:
        at = runs_at(compile_)
        if at is not None:
            yield at, compile_


def _function(line: UserLine) -> tuple[str, str]:
    return line.file, line.function


def _lines(compiles: Iterable[CompileRecord]) -> tuple[UserLine, ...]:
    return tuple(dict.fromkeys(lines_of(compiles)))


def _why(split: SplitCall) -> str:
    at = split.runs_at
    if split.skipped:
        return f"{split.name} is skipped since a graph break{at_text(split.broke_at)}, earlier in this process"
    if split.broken:
        place = split.broken.library or split.broken.line
        return f"{split.name} is compiled in parts: its graph breaks at {place}"
    if split.is_in_library:
        return f"{split.name} and hooks on it, or other code that torch calls around it, are compiled apart"
    return f"{split.name} runs in Python at {at.file}:{at.line}"


def _details(splits: Sequence[SplitCall]) -> tuple[str, ...]:
    texts: list[str] = []
    pieces: list[str] = []
    advice: list[str] = []
    for split in splits:
        pieces += [f"compiled on its own: {piece}" for piece in split.pieces]
        if split.skipped:
            texts.append(f"{_why(split)}: {split.skipped.reason}")
            advice.append(_ADVICE)
        elif split.broken:
            advice.append(f"what breaks it: {split.broken.reason}")
        else:
            advice.append(_ADVICE_ON_HOOKS if split.is_in_library else _ADVICE)
    return tuple(dict.fromkeys([*texts, *pieces, *advice]))
