"""What the ranks of a job have kept in its run directory -> the verdict that they would have come to, without them.

`python -m tpcompile.sentinel.afterwards FOLDER...` reads the verdict of the job's logs from stdin, if there is one, and
writes the better one to stdout. The rules are those of the live sentinel: `why_stuck` over the states, and the judge
of an exchange over records and executed lines.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpcompile.errors import ConfigError, ExitCode, TpCompileError
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import first, grouped
from tpcompile.evidence.judgement.verdict import agree_rules
from tpcompile.evidence.records import Check, RankRecord, Status, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.records.reader import read_record
from tpcompile.evidence.rundir import RunDir
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.evidence.timeline.conclude import with_branch
from tpcompile.evidence.timeline.flow import Flow
from tpcompile.ranks.exchange import Ask
from tpcompile.ranks.liveness import host_name
from tpcompile.ranks.recorded import record_side
from tpcompile.sentinel.asking import waited_for
from tpcompile.sentinel.checks import finding_check
from tpcompile.sentinel.deadlock import Deadlock, Seen
from tpcompile.sentinel.exited_ranks import lost_to_exited
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.hang import why_stuck
from tpcompile.sentinel.kept import Kept
from tpcompile.sentinel.messages import FINISHED, RankState
from tpcompile.sentinel.situation import Lost, Situation

_TIMEOUT_S = 20.0
"""Of an exchange, as the live one says it in a check."""
_ROUNDS = 3
"""A ring of waits counts where it is in so many rounds; ranks that have ended are in all of them."""


def kept_in(folders: Sequence[Path]) -> ByRank[Kept]:
    """What the ranks have kept, with the rings that are on this host. Raises ConfigError, PreflightError."""
    files = [file for folder in folders for file in folder.glob("kept/rank_*.json")]
    found = {kept.rank: kept.with_ring() for kept in (read_record(Kept, file) for file in files)}
    return ByRank(dict(sorted(found.items())))


def judged(folders: Sequence[Path], of_logs: Verdict | None = None) -> Verdict | None:
    """The verdict, or that of the logs led by the branch at which the ranks parted; None where no rank kept anything.

    Raises ConfigError and PreflightError for files that cannot be read.
    """
    everything = kept_in(folders)
    if not everything:
        return of_logs
    if of_logs is not None and of_logs.exit_code == ExitCode.FAIL and not _told(everything):
        flows = _flows(everything)
        return with_branch(of_logs, flows, {code.file for flow in flows.values() for code in flow.codes})
    domains = grouped(everything, lambda rank: everything[rank].members).values()
    verdicts = [_of_domain(everything.among(ranks), everything, folders) for ranks in domains]
    return first(one for one in verdicts if one.lead is not None) or of_logs or verdicts[0]


def _of_domain(kept: ByRank[Kept], everything: ByRank[Kept], folders: Sequence[Path]) -> Verdict:
    """The verdict on the ranks of one domain, by the judge of an exchange."""
    problem = _problem(kept, everything)
    records = _records(folders, kept)
    silent = kept.where(lambda one: not one.end)
    if problem is None and silent:  # does a branch say why, though no state does?
        observed = f"{named_ranks(silent.ranks)} ended without a word, as a process does that is killed"
        ended = finding_check(Finding(Cause.NEVER_ARRIVED, observed, kept.ranks, is_rank_known=False))
        verdict = _by_exchange(kept, records, _flows(everything), ended)
        if verdict.lead is not None and verdict.lead.parted is not None:
            return _incomplete(verdict, kept)
    verdict = _by_exchange(kept, records, _flows(everything), problem)
    is_open = problem is None or problem.cause == Cause.NEVER_ARRIVED
    is_apart = any(divergence.is_red for divergence in verdict.divergences)
    return _incomplete(verdict, kept) if is_open and not is_apart else verdict


def _by_exchange(
    kept: ByRank[Kept], records: Mapping[int, RankRecord], flows: Mapping[int, Flow], problem: Check | None
) -> Verdict:
    """The verdict of the judge, who asks ranks for what lies in the run directory."""
    rules, problems = agree_rules(timeout_s=_TIMEOUT_S), [problem] if problem is not None else []
    members = kept.first.members
    sides = {
        rank: record_side(record, rules, problems=problems, flow_of=flows.get, domain=members)
        for rank, record in records.items()
    }
    judge = min(sides, key=lambda rank: (rank not in flows, rank))
    ask = Ask(lambda ranks, *asked: {rank: sides[rank].own_answer(*asked) for rank in ranks if rank in sides})
    return sides[judge].judge({rank: side.own for rank, side in sides.items()}, {}, ask)


def _incomplete(verdict: Verdict, kept: ByRank[Kept]) -> Verdict:
    """Nobody lived to see whether the ranks that were waited for would have come."""
    update: dict[str, object] = {"status": Status.SKIPPED, "exit_code": ExitCode.INCOMPLETE}
    if verdict.lead is None:
        ends = {how: ranks for ranks, how in kept.map(lambda one: one.end or "was killed").sides()}
        texts = [f"{named_ranks(ranks)}: {how}" for how, ranks in ends.items()]
        update["summary"] = f"nothing differs between the ranks as far as they kept it; {'; '.join(texts)}"
    return verdict.model_copy(update=update)


def _records(folders: Sequence[Path], kept: ByRank[Kept]) -> dict[int, RankRecord]:
    """What the ranks compiled, of those that wrote it; where none did, records that hold nothing."""
    run, *beside = map(RunDir, folders)
    written = {record.rank: record for record in run.read_records(beside=beside) if record.rank in kept}
    return written or {
        rank: RankRecord(rank=rank, world_size=one.world_size, domain=one.domain) for rank, one in kept.items()
    }


def _flows(kept: ByRank[Kept]) -> dict[int, Flow]:
    return {rank: one.flow for rank, one in kept.items() if one.flow is not None}


def _told(kept: ByRank[Kept]) -> Check | None:
    """What a rank knew when it ended: the first to know, and what is no consequence of the end of another one."""
    told = [one for one in kept.values() if one.problem is not None]
    told.sort(key=lambda one: (one.problem is not None and one.problem.cause == Cause.COMMUNICATION, one.at_s))
    return first(one.problem for one in told)


def _problem(kept: ByRank[Kept], everything: ByRank[Kept]) -> Check | None:
    """What the ranks knew, or what their last states show."""
    told = _told(kept)
    if told is not None:
        return told
    found = _found(kept, everything)
    return finding_check(found) if found is not None else None


def _found(kept: ByRank[Kept], everything: ByRank[Kept]) -> Finding | None:
    """By the rules of the live sentinel.

    A rank that was killed while it waited was cut with the job, and is asked like one that lives. One that was killed
    elsewhere, while others wrote how they ended, is gone.
    """
    states = kept.found(_state)
    others = everything.without(kept).found(_state)
    silent = kept.where(lambda one: not one.end)
    cut = silent.where(lambda one: _is_waiting(one))
    spoke = kept.where(lambda one: bool(one.end) and one.end != FINISHED)
    gone = silent.without(cut) if spoke else silent.where(lambda one: one.aborted)
    found = _stuck(states.without(gone), others, gone)
    if found is not None:
        return found
    if spoke and cut:
        return _stuck(states.without(silent), others, silent)
    return _late(states, kept) or _left_alone(states)


def _left_alone(states: ByRank[RankState]) -> Finding | None:
    """A rank that failed after others had finished: what it was in is what they left out."""
    finished = states.where(lambda state: state.ended == FINISHED)
    failed = states.where(lambda state: state.ended not in ("", FINISHED))
    if not finished or not failed:
        return None
    here = failed.first.model_copy(update={"ended": ""})  # as it was when its collective failed
    return lost_to_exited({**finished, here.rank: here}, here)


def _stuck(states: ByRank[RankState], others: ByRank[RankState], gone: ByRank[Kept]) -> Finding | None:
    lost = ByRank(
        {
            rank: Lost(one.rank, "died", "", one.stack, one.aborted, host=host_name(one.process.host), is_final=True)
            for rank, one in gone.items()
        }
    )
    now = states if states else others
    if not now:
        return None
    found = why_stuck(Situation(now, before=now, lost=lost, other_domains=others.where(lambda one: one.waits)))
    return found or _ring(ByRank({**others, **states}), states.ranks)


def _ring(states: ByRank[RankState], domain: tuple[int, ...]) -> Finding | None:
    deadlock = Deadlock()
    rounds = [
        deadlock.find(states.map(lambda state: Seen(state=state, number=number, domain=domain)))  # noqa: B023
        for number in range(1, _ROUNDS + 1)
    ]
    return rounds[-1]


def _late(states: ByRank[RankState], kept: ByRank[Kept]) -> Finding | None:
    """The ranks for which another one waited longest when the job ended."""
    waiting = {
        rank: state.blocked_in.age_s if state.blocked_in is not None else state.since_s
        for rank, state in states.items()
        if _is_waiting(kept[rank]) and not state.ended
    }
    if not waiting:
        return None
    here = max(waiting, key=lambda rank: waiting[rank])
    return waited_for(states, here, waited_s=waiting[here])


def _state(kept: Kept) -> RankState | None:
    """Its last state; of a rank that went on after it, without the wait that it was in."""
    state = kept.state
    if state is None or kept.end or _is_waiting(kept):
        return state
    issued = tuple(one.model_copy(update={"is_done": True}) for one in state.issued)
    return state.model_copy(update={"blocked": False, "p2p": None, "waits_at": None, "calling": "", "issued": issued})


def _is_waiting(kept: Kept) -> bool:
    """True for a rank that waited for others when it was seen last, and has executed nothing since."""
    flow, state = kept.flow, kept.state
    if state is None or not state.waits:
        return False
    return flow is None or bool(kept.end) or flow.num_recorded <= kept.num_recorded


def main(arguments: Sequence[str]) -> None:
    """Print the verdict of these folders."""
    given = sys.stdin.read()
    of_logs = Verdict.model_validate_json(given) if given.strip() else None
    verdict = judged([Path(argument) for argument in arguments], of_logs)
    if verdict is None:
        raise ConfigError("no rank has kept anything there")
    sys.stdout.write(verdict.to_json())


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TpCompileError as error:
        sys.exit(f"error: {error}")
