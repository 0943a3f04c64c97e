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
    below = list(itertools.takewhile(_is_no_wrapper, reversed(compile_.stack)))
    if len(below) == len(compile_.stack):
        return None  # the compiled callable is not on the stack
    return last(own_lines(below[1:]))


def skipped_frame(at: UserLine, failed: Iterable[SkippedFrame]) -> SkippedFrame | None:
    """The failed compile of the code object that a line runs in, if it is known."""
    same = [f for f in failed if _function(f.line) == _function(at) and f.line.line <= at.line]
    return max(same, key=lambda frame: frame.line.line, default=None)


def _advice(split: SplitCall) -> str:
    if split.skipped is None and split.broken:
        return f"what breaks it: {split.broken.reason}"
    return _ADVICE_ON_HOOKS if split.is_in_library and not split.skipped else _ADVICE


def region_check(
    mode: str, digests: Sequence[RankDigest], *, phases: Iterable[str], accepted: Sequence[GraphBreak] = ()
) -> Check:
    """Check that every call of a compiled callable enters one region, apart from `accepted` graph breaks."""
    wanted = set(phases)
    places = _places(accepted)
    found = [(rank, split) for rank, split in _of_all(digests) if split.phase in wanted]
    splits = [(rank, split) for rank, split in found if _place(split.broke_at or split.runs_at) not in places]
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


def _places(breaks: Iterable[GraphBreak]) -> set[tuple[str, int]]:
    """Where these breaks end a graph: their lines, and those of the calls that lead there."""
    lines = itertools.chain.from_iterable([*known([found.line]), *found.stack] for found in breaks)
    return set(map(_place, lines))


def _place(line: UserLine) -> tuple[str, int]:
    return line.file, line.line


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
    return Check(
        id=CheckId.ONE_REGION,
        mode=mode,
        status=status,
        expected=_EXPECTED,
        observed=_observed(shown, ranks),
        details=_details([split for _, split in splits]),
        ranks=ranks,
        line=shown.broke_at or shown.runs_at,
    )


def _is_no_wrapper(line: UserLine) -> bool:
    return line.function != _WRAPPER or not line.file.endswith(_WRAPPER_FILE)


def _failed_frame(compile_: CompileRecord) -> SkippedFrame | None:
    """The frame, where its compile failed."""
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
    pieces = [c for c in compiles if _is_run_by(c, at)]
    named_by = at
    if _is_inside(at, count.target):
        named_by = count.target
    return SplitCall(
        phase=count.phase,
        runs_at=at,
        name=named_by.function,
        regions_per_call=count.most,
        pieces=_lines(pieces),
        skipped=skipped_frame(at, skipped),
    )


def _entered_by_library(
    count: RegionCount, compiles: Sequence[CompileRecord], skipped: Sequence[SkippedFrame]
) -> SplitCall:
    """The callable, where only code of torch runs between it and its regions."""
    own = [c for c in compiles if c.phase == count.phase and _is_frame(c, count.target)]
    breaks = itertools.chain.from_iterable(compile_.breaks for compile_ in own)
    beside = [c for c in compiles if c.graphs and c.phase == count.phase and _is_beside(c, count.target, compiles)]
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


def _is_frame(compile_: CompileRecord, target: UserLine) -> bool:
    """True for a compile of the function that begins at `target`, whether of the user's or of torch."""
    frame = last(compile_.stack)
    return frame is not None and (frame.file, frame.line) == (target.file, target.line)


def _is_beside(compile_: CompileRecord, target: UserLine, compiles: Sequence[CompileRecord]) -> bool:
    """True when a frame was compiled in the calls in which `target` was."""
    calls = {_call(c) for c in compiles if c.line and (c.line.file, c.line.line) == (target.file, target.line)}
    return runs_at(compile_) is None and _call(compile_) in calls


def _call(compile_: CompileRecord) -> tuple[UserLine, ...]:
    """The stack down to the compiled callable."""
    below = len(list(itertools.takewhile(_is_no_wrapper, reversed(compile_.stack))))
    return compile_.stack[: len(compile_.stack) - below]


def _is_run_by(compile_: CompileRecord, function: UserLine) -> bool:
    """True when a frame was entered from the function that a line is in."""
    at = runs_at(compile_)
    return at is not None and _function(at) == _function(function)


def _from_stacks(compiles: Sequence[CompileRecord], skipped: Sequence[SkippedFrame]) -> Iterable[SplitCall]:
    """Functions that run in Python inside of a compiled callable, from the stacks of what was compiled in them."""
    by_function = grouped(_entered(compiles), lambda pair: (pair[1].phase, *_function(pair[0])))
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
        if at and compile_.graphs:
            yield at, compile_


def _is_inside(at: UserLine, target: UserLine) -> bool:
    """True when a frame runs the function that begins at `target`, whose name is qualified."""
    return at.file == target.file and target.function.rpartition(".")[2] == at.function


def _function(line: UserLine) -> tuple[str, str]:
    return line.file, line.function


def _lines(compiles: Iterable[CompileRecord]) -> tuple[UserLine, ...]:
    return tuple(dict.fromkeys(lines_of(compiles)))


def _observed(split: SplitCall, ranks: Sequence[int]) -> str:
    number = f"{split.regions_per_call} regions per call" if split.regions_per_call else "several regions"
    return f"{number} on {named_ranks(ranks)}: {_why(split)}"


def _why(split: SplitCall) -> str:
    at = split.runs_at
    broken = split.broken
    if split.skipped is None and broken:
        return f"{split.name} is compiled in parts: its graph breaks at {broken.library or broken.line}"
    if split.skipped is None and split.is_in_library:
        return f"{split.name} and hooks on it, or other code that torch calls around it, are compiled apart"
    if split.skipped is None:
        return f"{split.name} runs in Python at {at.file}:{at.line}"
    return f"{split.name} is skipped since a graph break{at_text(split.broke_at)}, earlier in this process"


def _details(splits: Sequence[SplitCall]) -> tuple[str, ...]:
    texts = [f"{_why(split)}: {split.skipped.reason}" for split in splits if split.skipped]
    pieces = [f"compiled on its own: {piece}" for split in splits for piece in split.pieces]
    advice = list(map(_advice, splits))
    return tuple(dict.fromkeys([*texts, *pieces, *advice]))
