"""Counted regions and stacks of compiles -> compiled callables that do not run as one region, and why.

A graph break inside of a loop, or a compile that fails, makes Dynamo skip that *code object* for the life of the
process. Every other instance of the class then runs region by region, with all graph-break counters at zero and with
`fullgraph=True` satisfied (pytorch 144820, 132923). What tells is the number of regions that a call enters, and in a
trace the frames of user code between the compiled callable and the compiled frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpcompile.evidence.records import (
    Check,
    CheckId,
    CompileRecord,
    RankDigest,
    RankRecord,
    RegionCount,
    SkippedFrame,
    SplitCall,
    Status,
    UserLine,
)
from tpcompile.evidence.text.lines import is_library
from tpcompile.evidence.text.ranks import ranks_text

_WRAPPER, _WRAPPER_FILE = "compile_wrapper", "_dynamo/eval_frame.py"
_ADVICE = (
    "fullgraph=True does not help: Dynamo skips a code object for the life of the process, whichever instance broke "
    "its graph. Fix the line that broke it, or call torch.compiler.reset() after the call that did"
)


def splits_of(record: RankRecord) -> tuple[SplitCall, ...]:
    """Compiled callables of one rank that entered more than one region in a call.

    Where nobody counted, as in a trace file: those inside of which a frame was compiled on its own.
    """
    skipped = (*record.skipped, *_failed(record.compiles))
    if record.regions:
        counted = [c for c in record.regions if c.most > 1 and c.runs_at is not None]
        return tuple(_counted(c, record.compiles, skipped) for c in counted)
    return tuple(_from_stacks(record.compiles, skipped))


def runs_at(compile_: CompileRecord) -> UserLine | None:
    """The user's line below the compiled callable from which this frame was entered; None for the callable itself."""
    wrappers = [i for i, line in enumerate(compile_.stack) if _is_wrapper(line)]
    if not wrappers:
        return None
    between = compile_.stack[wrappers[-1] + 1 : -1]
    return next((line for line in between if not is_library(line)), None)


def skipped_frame(at: UserLine, failed: Iterable[SkippedFrame]) -> SkippedFrame | None:
    """The failed compile of the code object that a line runs in, if it is known."""
    same = [f for f in failed if (f.line.file, f.line.function) == (at.file, at.function) and f.line.line <= at.line]
    return max(same, key=lambda frame: frame.line.line, default=None)


def region_check(mode: str, digests: Sequence[RankDigest], *, phases: Iterable[str]) -> Check:
    """Red where a call of a compiled callable enters more than one region."""
    wanted = set(phases)
    by_rank = {d.rank: [s for s in d.splits if s.phase in wanted] for d in digests}
    bad = [rank for rank, splits in by_rank.items() if splits]
    splits = [split for rank in bad for split in by_rank[rank]]
    is_counted = any(d.regions_counted for d in digests)
    worst = max(splits, key=lambda split: split.regions_per_call, default=None)
    passed = Status.PASS if is_counted else Status.SKIPPED
    return Check(
        id=CheckId.ONE_REGION,
        mode=mode,
        status=Status.FAIL if bad else passed,
        expected="1 compiled region entered per call, on every rank",
        observed=_observed(worst, bad) if worst else "1" if is_counted else "not counted",
        details=_details(splits),
        ranks=tuple(bad),
        line=_line(worst) if worst else None,
    )


def split_note(digests: Sequence[RankDigest]) -> list[Check]:
    """The same of a job's trace files, as information: a program may be meant to run in several regions."""
    by_rank = {d.rank: d.splits for d in digests if d.splits}
    if not by_rank:
        return []
    splits = [split for found in by_rank.values() for split in found]
    return [
        Check(
            id=CheckId.ONE_REGION,
            mode="",
            status=Status.INFO,
            expected="1 compiled region entered per call, on every rank",
            observed=_observed(splits[0], list(by_rank)),
            details=_details(splits),
            ranks=tuple(by_rank),
            line=_line(splits[0]),
        )
    ]


def _is_wrapper(line: UserLine) -> bool:
    return line.function == _WRAPPER and line.file.endswith(_WRAPPER_FILE)


def _failed(compiles: Sequence[CompileRecord]) -> list[SkippedFrame]:
    """Frames of which a compile failed, by their records."""
    failed = [c for c in compiles if c.failure and c.line is not None and not c.graphs]
    found = []
    for compile_ in failed:
        assert compile_.line is not None, "picked above"
        broke_at = next((b.line for b in compile_.breaks if b.line), compile_.failure_line)
        found.append(SkippedFrame(line=compile_.line, reason=compile_.failure, broke_at=broke_at))
    return found


def _counted(count: RegionCount, compiles: Sequence[CompileRecord], skipped: Sequence[SkippedFrame]) -> SplitCall:
    assert count.runs_at is not None, "picked by splits_of"
    inside = [c for c in compiles if c.line and (at := runs_at(c)) and _same_function(at, count.runs_at)]
    is_target = _is_inside(count.runs_at, count.target)
    return SplitCall(
        phase=count.phase,
        runs_at=count.runs_at,
        name=count.target.function if is_target else count.runs_at.function,
        regions_per_call=count.most,
        pieces=_lines(inside),
        skipped=skipped_frame(count.runs_at, skipped),
    )


def _from_stacks(compiles: Sequence[CompileRecord], skipped: Sequence[SkippedFrame]) -> Iterable[SplitCall]:
    found: dict[tuple[str, str, str], list[CompileRecord]] = {}
    first: dict[tuple[str, str, str], UserLine] = {}
    for compile_ in compiles:
        at = runs_at(compile_)
        if at is None or not compile_.graphs:
            continue
        key = (compile_.phase, at.file, at.function)
        found.setdefault(key, []).append(compile_)
        first.setdefault(key, at)
    for key, pieces in found.items():
        at = first[key]
        yield SplitCall(
            phase=key[0], runs_at=at, name=at.function, pieces=_lines(pieces), skipped=skipped_frame(at, skipped)
        )


def _is_inside(at: UserLine, target: UserLine) -> bool:
    """True when a frame runs the function that begins at `target`, whose name is qualified."""
    return at.file == target.file and target.function.rpartition(".")[2] == at.function


def _same_function(a: UserLine, b: UserLine) -> bool:
    return (a.file, a.function) == (b.file, b.function)


def _lines(compiles: Iterable[CompileRecord]) -> tuple[UserLine, ...]:
    return tuple(dict.fromkeys(c.line for c in compiles if c.line is not None))


def _line(split: SplitCall) -> UserLine:
    """The line to fix: where the graph broke, else where the code runs in Python."""
    broke_at = split.skipped.broke_at if split.skipped else None
    return broke_at or split.runs_at


def _observed(split: SplitCall, ranks: Sequence[int]) -> str:
    number = f"{split.regions_per_call} regions per call" if split.regions_per_call else "several regions"
    return f"{number} on rank {ranks_text(ranks)}: {_why(split)}"


def _why(split: SplitCall) -> str:
    at = split.runs_at
    if split.skipped is None:
        return f"{split.name} runs in Python at {at.file}:{at.line}"
    broke_at = f" at {split.skipped.broke_at}" if split.skipped.broke_at else ""
    return f"{split.name} is skipped since a graph break{broke_at}, earlier in this process"


def _details(splits: Sequence[SplitCall]) -> tuple[str, ...]:
    if not splits:
        return ()
    texts = [f"{_why(split)}: {split.skipped.reason}" for split in splits if split.skipped]
    pieces = [f"compiled on its own: {line}" for split in splits for line in split.pieces]
    return tuple(dict.fromkeys([*texts, *pieces, _ADVICE]))
