"""Folders of TORCH_TRACE files of any job -> verdict, offline.

What a log does not hold was not observed, and is not a difference: caches omit artifacts, the log of a killed process
ends inside a record, a rank may have left no log. Nor is it agreement: the verdict is then neither green nor red, exit
code 6.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tpcompile.errors import ConfigError, ExitCode, PreflightError
from tpcompile.evidence.comparison.compare import Allowed
from tpcompile.evidence.digests.split_regions import split_note
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import find, grouped
from tpcompile.evidence.judgement import checks
from tpcompile.evidence.judgement.verdict import Rules, conclude
from tpcompile.evidence.logs.domains import Mesh, Source, by_groups
from tpcompile.evidence.logs.ends import LogEnd, described, failed_everywhere, failed_first, log_ends
from tpcompile.evidence.logs.files import find_logs, printable, unpacked
from tpcompile.evidence.logs.issued import executed, lonely_groups, scheduled
from tpcompile.evidence.logs.job import Job
from tpcompile.evidence.logs.jobdigest import MAX_BYTES, JobDigest, Selection, select
from tpcompile.evidence.logs.ranklog import RankLog, read_rank_log
from tpcompile.evidence.records import (
    Check,
    CheckId,
    Divergence,
    DivergenceClass,
    Layer,
    RankDigest,
    Status,
    Verdict,
)
from tpcompile.evidence.records.base import known
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks

LEFT_OUT, EXAMINED, FAILED, INPUTS = "files left out", "functions compared", "failed compiles", "inputs"
"""Names of checks."""
SIDE_BY_SIDE_BYTES = 30_000_000
"""Size of the logs above which they are read in parallel processes."""
_HASHED = frozenset({Layer.GRAPH, Layer.GUARDS, Layer.COLLECTIVES})
"""Layers made from payloads: a size, stride, dtype or mark of an input that is not dynamic is in them too."""
_NEED_NOT_AGREE = frozenset({
    Cause.SHAPE, Cause.AUTOMATIC_DYNAMIC, Cause.RANK_BRANCH, Cause.EXTRA_COMPILE, Cause.COMPILE_DISABLED,
})  # fmt: skip
"""Differences in sizes, and in which code a rank runs: expected between ranks without a common group."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a job besides its logs."""

    world_size: int | None = None
    """Ranks the job had; default: as many as the logs show."""
    mesh: Mesh | None = None
    """Which ranks must agree; default: those whose compiled code names a common process group."""
    allowed: Allowed = ()
    """Intended differences."""
    uneven: tuple[tuple[str, str], ...] = ()
    """(function, reason): compiled functions whose content may differ; their collectives may not."""
    ended_badly: bool = False
    """The job crashed or hung: that its compiles agree is not a pass then."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job where it is given, else 0."""
        said = self.mesh or self
        return said.world_size or 0


@dataclass(frozen=True)
class Examined:
    """A job that was judged, and what it was judged by."""

    verdict: Verdict
    job: Job
    digest: JobDigest


def diagnose(folders: Sequence[Path], question: Question | None = None) -> Verdict:
    """Judge the logs of a job. Raises ConfigError, PreflightError."""
    with examined(folders, question) as found:
        return found.verdict


@contextmanager
def examined(folders: Sequence[Path], question: Question | None = None) -> Iterator[Examined]:
    """Judge the logs of a job; inside the block they can be read further. Raises ConfigError, PreflightError."""
    question = question or Question()
    files = find_logs(folders, num_ranks=question.num_ranks)
    with unpacked(files.paths) as plain:
        logs = _read_all(plain.paths)
        for rank in plain.cut:
            logs[rank].facts.is_cut = True
        yield _judged(logs, question, files.left_out)


def _judged(logs: ByRank[RankLog], question: Question, left_out: Sequence[str]) -> Examined:
    world_size = _world_size(question, max(logs) + 1)
    missing = sorted(set(range(world_size)).difference(logs))
    if question.mesh is not None:
        domains = question.mesh.domains()
    else:
        domains = by_groups(logs.map(lambda log: log.coupling), missing=missing)
    ends = log_ends(logs, missing, domains.domains)
    incomplete = ends.where(lambda end: end.is_partial)
    job = Job(logs, domains, world_size=world_size, incomplete=frozenset(incomplete))
    diagnosis = _Diagnosis(job, question, ends, left_out)
    verdict = diagnosis.verdict()
    return Examined(verdict, job, diagnosis.digest)


def _read_all(paths: Mapping[int, Path]) -> ByRank[RankLog]:
    """Read the logs, large ones in parallel."""
    size_bytes = sum(path.stat().st_size for path in paths.values())
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1  # macOS does not say
    num_workers = min(len(paths), num_cores)
    is_small = size_bytes < SIDE_BY_SIDE_BYTES
    if is_small or num_workers == 1:
        one_by_one = map(_read, paths, paths.values())
        return ByRank(dict(zip(paths, one_by_one, strict=True)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        in_parallel = pool.map(_read, paths, paths.values())
        return ByRank(dict(zip(paths, in_parallel, strict=True)))


def _read(rank: int, path: Path) -> RankLog:
    try:
        return read_rank_log(rank, path)
    except OSError as error:
        raise PreflightError(f"cannot read {printable(path)}: {error.strerror}") from None


def _world_size(question: Question, seen: int) -> int:
    """Number of ranks of the job; the logs show at least `seen`."""
    if question.mesh is None:
        return max(question.num_ranks, seen)
    size = question.mesh.world_size
    said = question.world_size or size
    had = max(said, seen)
    if said != size or had > size:
        raise ConfigError(f"the mesh has {size} ranks, the job had {had}; give the sizes of all its axes")
    return size


class _Diagnosis:
    """One job and what is asked of it -> verdict."""

    def __init__(self, job: Job, question: Question, ends: ByRank[LogEnd], left_out: Sequence[str]) -> None:
        self.job, self.question, self.ends, self.left_out = job, question, ends, left_out
        self.lacking = ends.where(lambda end: end.lacks)
        self.failed = failed_everywhere(job.logs)
        self.unconfirmed: list[Divergence] = []
        """Differences that only the descriptions of the inputs have."""

        self.digest: JobDigest
        """What the last `conclude` made of the logs."""

    def verdict(self) -> Verdict:
        """Parse the first frames that differ, and more of them only when those are not red."""
        selection = select(self.job)
        found = self.conclude(selection)
        is_red = found.exit_code == ExitCode.FAIL
        if selection.num_left and not is_red:
            selection = select(self.job, budget_bytes=MAX_BYTES)
            found = self.conclude(selection)
        limits = list(self.limits())
        if selection.num_left:
            text = f"{selection.num_left} more functions differ in their text and were not compared"
            note = _information(text, [], name=EXAMINED)
            found = found.changed(checks=(*found.checks, note))
            limits.append(Limit(2, note, f"what was compared agrees: {text}"))
        return _limited(found, limits)

    def conclude(self, selection: Selection) -> Verdict:
        self.digest = JobDigest(self.job, selection)
        rules = Rules(self.judge, 0.0, preset="trace logs", allowed=tuple(self.question.allowed), revise=self.revised)
        return conclude(rules, self.digest.digests(), self.digest.fetch, world_size=self.job.world_size)

    def judge(self, digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
        environment, *layers = checks.agreed(digests, divergences)
        left_out = []
        if self.left_out:
            text = f"{len(self.left_out)} named like a log, but not read"
            left_out.append(_information(text, self.left_out, name=LEFT_OUT))
        return [
            self.compiled(),
            self.versions(environment),
            *layers,
            *split_note(digests),
            *_failed_alone(self.job.logs),
            *(limit.note for limit in self.limits()),
            *left_out,
        ]

    # What the logs show besides the digests.

    def revised(self, divergences: tuple[Divergence, ...]) -> tuple[Divergence, ...]:
        """Differences that are expected in this job become information; those of schedules and runs are added."""
        self.unconfirmed = list(filter(_is_unconfirmed, divergences))
        found = list(map(self.accepted, divergences))
        # ranks that will wait for each other in the graphs run, and schedule, different things as a consequence
        hanging = {divergence.domain for divergence in found if divergence.cls == DivergenceClass.COLLECTIVES}
        for logs in self.job.domains:
            if logs.domain.name not in hanging:
                found += [*lonely_groups(logs), *scheduled(logs), *executed(logs)]
        return tuple(found)

    def accepted(self, divergence: Divergence) -> Divergence:
        """The divergence, or the same as information."""
        if divergence.cls != DivergenceClass.CONTENT:
            return divergence
        lines = known(group.frame_line for group in divergence.groups)
        functions = {line.function for line in lines}
        for function, reason in self.question.uneven:
            if function in functions:
                return _as(divergence, DivergenceClass.DECLARED, f"declared: {reason}")
        is_uncoupled = self.job.source == Source.NOTHING
        if is_uncoupled and divergence.cause in _NEED_NOT_AGREE:
            return _as(divergence, DivergenceClass.LABEL, _UNCOUPLED)
        if _is_unconfirmed(divergence):
            return _as(divergence, DivergenceClass.LABEL, _UNCONFIRMED)
        return divergence

    # Checks.

    def versions(self, environment: Check) -> Check:
        """Logs have torch's version and nothing else of the environment."""
        if environment.is_red:
            return environment
        logs = self.job.logs
        unknown = logs.where(lambda log: not log.torch_version)
        if unknown:
            observed = "not observed"
            if len(unknown) < len(logs):
                observed += f" on {named_ranks(unknown.ranks)}"
            return environment.changed(status=Status.SKIPPED, observed=observed)
        observed = f"torch {logs.first.torch_version} on all ranks; nothing else is logged"
        return environment.changed(observed=observed)

    def compiled(self) -> Check:
        """Passes where any rank compiled something; types of errors are listed."""
        fail_types = self.job.logs.map(lambda log: [compile_.fail_type for compile_ in log.compiles])
        numbers = fail_types.map(lambda types: types.count(""))
        if not any(numbers.values()):
            return self.nothing_compiled()
        observed = ", ".join(f"{number} on {named_ranks(ranks)}" for ranks, number in numbers.sides())
        errors = sorted(set[str]().union(*fail_types.values()) - {""})
        if errors:
            observed += f"; failed compiles: {', '.join(errors)}"
        return Check(id=CheckId.COMPILED, status=Status.PASS, expected=_COMPILED, observed=observed)

    def nothing_compiled(self) -> Check:
        """No compile succeeded: the reason is the first fatal error, else the first error of a skipped frame."""
        check = Check(
            id=CheckId.COMPILED,
            status=Status.FAIL,
            expected=_COMPILED,
            observed="no compile in the logs",
            cause=Cause.NOTHING_COMPILED,
        )
        failures = [compile_ for log in self.job.logs.values() for compile_ in log.compiles if compile_.fail_type]
        if not failures:
            return check
        why = find(failures, lambda compile_: compile_.is_fatal) or failures[0]
        fail_types = {compile_.fail_type for compile_ in failures}
        others = sorted(fail_types - {why.fail_type})
        observed = why.failed
        if others:
            observed += f"; further errors: {', '.join(others)}"
        return check.changed(observed=observed, line=why.line)

    def limits(self) -> Iterator[Limit]:
        """What the logs of this job do not cover."""
        if self.failed:
            texts = [compile_.failed for compile_ in self.failed]
            first, *_ = self.failed
            note = _information(f"{len(texts)} failed alike on all ranks", texts, name=FAILED)
            doubt = f"the ranks agree: {first.function} failed to compile on all of them with {first.error}"
            yield Limit(1, note, doubt)
        if self.lacking:
            yield _lacking(self.lacking)
        elif self.question.ended_badly:
            note = _information("yes", described(self.ends), id=CheckId.LOGS_COMPLETE)
            alike = grouped(self.ends, lambda rank: self.ends[rank].last_compile)
            texts = [f"{named_ranks(ranks)}: {last}" for last, ranks in alike.items()]
            yield Limit(0, note, f"the compiles agree; the cause is not in them. {'; '.join(texts)}")
        if self.unconfirmed:
            titles = [divergence.title for divergence in self.unconfirmed]
            text = f"described differently under equal graphs and guards in {len(titles)} functions"
            doubt = f"the graphs agree, but inputs are {text}: {titles[0]}"
            yield Limit(2, _information(text, titles, name=INPUTS), doubt)


_COMPILED = "at least 1 compile in the logs"
_NOT_ALL = (
    "these logs hold compiles only: if the job hung or crashed, the cause is not in the compiles, and --ended-badly "
    "reports how each log ends"
)
_UNCOUPLED = (
    "No compiled code names a process group, so it is unknown whether these ranks run one program (pipeline stages "
    "and replicas need not). If they must agree, pass --mesh and --axis, e.g. --mesh tp=2 --axis tp."
)


_UNCONFIRMED = (
    "Only the descriptions of the inputs differ; the graphs and guards of this function agree. No hash covers these "
    "descriptions, so this is a damaged log, or an input whose size no guard checks: print the shapes that enter the "
    "function on these ranks."
)


@dataclass(frozen=True)
class Limit:
    """Something that the logs of a job do not cover: a note in every verdict, and the summary instead of a pass."""

    weight: int
    """The limit with the largest weight gives the summary of a verdict."""
    note: Check
    doubt: str


def _limited(verdict: Verdict, limits: Sequence[Limit]) -> Verdict:
    """The verdict, with a pass turned into incomplete where the logs do not cover the whole job."""
    if verdict.exit_code != ExitCode.PASS:
        return verdict
    if not limits:
        return verdict.changed(summary=f"{verdict.summary}; {_NOT_ALL}")
    heaviest = max(limits, key=lambda limit: limit.weight)
    return verdict.changed(status=Status.SKIPPED, exit_code=ExitCode.INCOMPLETE, summary=heaviest.doubt)


def _lacking(lacking: ByRank[LogEnd]) -> Limit:
    text = f"not on {named_ranks(lacking.ranks)}; what is missing there was not observed"
    note = _information(text, described(lacking), id=CheckId.LOGS_COMPLETE)
    more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    doubt = f"what was logged agrees, but the logs are incomplete: {lacking.first}{more}"
    return Limit(3, note.changed(ranks=lacking.ranks), doubt)


def _is_unconfirmed(divergence: Divergence) -> bool:
    """True for a difference of inputs under equal graphs and guards, which would show it in text that is hashed."""
    is_of_inputs = divergence.layer == Layer.INPUTS and divergence.cls == DivergenceClass.CONTENT
    return is_of_inputs and _HASHED.isdisjoint(divergence.consequences)


def _failed_alone(logs: ByRank[RankLog]) -> Iterator[Check]:
    """The compile that ended the job, where it failed on one rank only."""
    found = failed_first(logs)
    if found is None:
        return
    rank, compile_ = found
    how = f"{compile_.function} failed on rank {rank} with {compile_.error}"
    yield Check(
        name=FAILED,
        status=Status.FAIL,
        expected="every compile ends",
        observed=f"{how}; the remaining logs end inside that compile",
        ranks=(rank,),
        line=compile_.line,
        cause=Cause.COMPILE_FAILED,
    )


def _as(divergence: Divergence, cls: DivergenceClass, advice: str) -> Divergence:
    return divergence.changed(cls=cls, advice=advice, consequences=())


def _information(observed: str, details: Iterable[str], *, name: str = "", id: CheckId = CheckId.OTHER) -> Check:
    return Check(
        id=id,
        name=name,
        status=Status.INFO,
        expected="yes",
        observed=observed,
        details=tuple(details),
    )
