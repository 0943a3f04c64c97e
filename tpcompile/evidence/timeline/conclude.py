"""A red verdict, and what each rank executed -> the verdict that leads with the branch at which the ranks parted.

What the verdict said before is then the consequence. Content that differs (a guard, a constant, an input) stays the
headline; the branch says which line made it differ.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import PurePath

from tpcompile.evidence.iterables import first
from tpcompile.evidence.judgement import leading
from tpcompile.evidence.judgement.checks import CAUSES
from tpcompile.evidence.records import Check, CheckId, Lead, Status, UserLine, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.records.findings import Divergence, Parted, Went
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.evidence.timeline.flow import Flow
from tpcompile.evidence.timeline.own_branch import left_own_part, left_own_pass, left_own_way
from tpcompile.evidence.timeline.part import parted
from tpcompile.evidence.timeline.source import is_loop

_CONSEQUENCES = frozenset({
    Cause.STUCK_COLLECTIVE, Cause.CALL_COUNT, Cause.EXTRA_COLLECTIVE, Cause.COLLECTIVE_SIZES, Cause.COMMUNICATION,
    Cause.KILLED, Cause.NEVER_ARRIVED, Cause.STOPPED_RESPONDING, Cause.ORDER_FORWARD, Cause.ORDER_BACKWARD,
    Cause.EXTRA_COMPILE, Cause.RAISED, Cause.UNKNOWN,
})  # fmt: skip
"""What becomes of a job whose ranks took different branches before."""
_WORD = re.compile(r"[A-Za-z_]\w*")
_OF_COLLECTIVES = _CONSEQUENCES - {Cause.COLLECTIVE_SIZES, Cause.UNKNOWN}
"""Of these, those that data alone does not bring about: where all ranks issued the same, no branch explains them."""
_DOES = {
    "line": "goes on at {place}",
    "enters": "enters {name} ({place})",
    "returns": "returns to {name} ({place})",
    "region": "calls the compiled {name}",
    "ends": "ends there",
    "raises": "leaves by an exception",
    "value": "{value} ({place})",
}
"""What ranks do after a branch."""
_PLURAL = {"goes": "go"}
_DID = {
    "line": "went on at {place}",
    "enters": "entered {name} ({place})",
    "returns": "returned to {name} ({place})",
    "region": "called the compiled {name}",
    "ends": "ended there",
    "raises": "left by an exception",
    "value": "{value} ({place})",
}
_EQUAL_VALUES = "Make what is set there equal on all ranks."
_A_PAIR = 2
_FAULTS = frozenset({
    Cause.GRAPH_BREAK, Cause.COMPILE_DISABLED, Cause.COMPILE_FAILED, Cause.NOTHING_COMPILED, Cause.RECOMPILE_LIMIT,
    Cause.RANK_BRANCH, Cause.RANK_CONSTANT, Cause.GROUP,
})  # fmt: skip
"""What is wrong by itself on the rank that did it, whatever the other one did."""
_RAISED = frozenset({Cause.RAISED, Cause.COMMUNICATION})
"""After the ranks took different branches, the one whose communication fails raises, whoever left the program."""
_OF_SIZES = frozenset({Cause.STUCK_COLLECTIVE, Cause.COMMUNICATION})
"""What sizes that differ may end as: gloo ends one of the ranks, and another one waits in the next collective."""
NOT_RECORDED = Check(
    name="executed lines",
    status=Status.INFO,
    expected="recorded",
    observed="not recorded: with Python 3.12, or Sentinel(flow=True), the branch at which the ranks parted is named",
)
"""Noted where a branch may be the reason."""


def without_branch(verdict: Verdict) -> Verdict:
    """The verdict of ranks whose lines were not recorded, which says how to have them."""
    if verdict.lead is None or verdict.lead.cause not in _CONSEQUENCES:
        return verdict
    return verdict.model_copy(update={"checks": (*verdict.checks, NOT_RECORDED)})


def with_branch_of(live: Verdict, verdict: Verdict) -> Verdict:
    """The verdict that is made again from a run directory, with what the live one knew of the executed lines."""
    if NOT_RECORDED in live.checks:
        return verdict.model_copy(update={"checks": (*verdict.checks, NOT_RECORDED)})
    if live.lead is None or live.lead.parted is None:
        return verdict
    return verdict.model_copy(update={"lead": live.lead, "summary": live.summary})


def with_branch(
    verdict: Verdict,
    flows: Mapping[int, Flow],
    readable: Collection[str],
    elsewhere: Callable[[], Mapping[int, Flow]] = dict,
) -> Verdict:
    """The verdict, led by the branch where one is known. `readable` are the files that may be opened here.

    Ranks of a domain do the same, so they are compared first; where they did, those `elsewhere` are as well: what ranks
    of different domains do differently all the time is no branch that counts. Where ranks of one domain part all the
    time, as those that have roles of their own, the one that left its own way is looked for.
    """
    flows = _until_seen(verdict, flows)
    found = _with_witnesses(verdict, _with_branch(verdict, flows, readable), flows, readable, elsewhere)
    habit = found.lead.parted if found is not verdict and found.lead is not None else None
    if habit is not None and habit.is_habit and not _is_odd_known(habit, verdict.lead):
        own = _with_own_branch(verdict, flows, readable, may_be_between=True)
        own = own if own is not verdict else _with_only_own_way(verdict, habit, flows, readable)
        return own if own is not verdict else found
    if found is not verdict:
        return found
    is_of_domain = any(divergence.is_red for divergence in verdict.divergences)
    if is_of_domain:  # what others do explains no difference between programs of one domain
        return _with_own_part(verdict, flows, readable)
    others = elsewhere()
    found = _with_own_branch(verdict, {**flows, **others}, readable)
    if found is not verdict or not others:
        return found
    return _with_branch(verdict, {**flows, **others}, readable, is_same_program=False)


def _until_seen(verdict: Verdict, flows: Mapping[int, Flow]) -> Mapping[int, Flow]:
    """What the ranks executed up to the call at which they differ, though it is seen later: the rest came of it."""
    try:
        seen = _seen_at(verdict, flows)
        return flows if seen is None else {rank: flow.up_to(*seen) for rank, flow in flows.items()}
    except ValueError:  # a peer sent what is no flow
        return flows


def _seen_at(verdict: Verdict, flows: Mapping[int, Flow]) -> tuple[UserLine, int] | None:
    """A line, and the number of its execution: of values that differ, or of the call that one rank alone compiled."""
    lead = verdict.lead
    if lead is None:
        return None
    if lead.line is not None and lead.at_call:
        return lead.line, lead.at_call
    compiled = first(one for one in verdict.divergences if one.is_red and one.cause is lead.cause)
    rank = first(rank for rank in lead.ranks if rank in flows)
    if compiled is None or compiled.step is None or rank is None or not lead.is_rank_known:
        return None
    return flows[rank].call_of(compiled.frame, compiled.step)


def _with_witnesses(
    verdict: Verdict,
    found: Verdict,
    flows: Mapping[int, Flow],
    readable: Collection[str],
    elsewhere: Callable[[], Mapping[int, Flow]],
) -> Verdict:
    """Of two ranks that parted, the other replicas of the program say which one went another way than theirs."""
    two = _compared(found.lead.parted) if found.lead is not None and found.lead.parted is not None else ()
    if len(two) != _A_PAIR or verdict.world_size == _A_PAIR:
        return found
    across = _with_branch(verdict, {**flows, **elsewhere()}, readable, is_same_program=False)
    known = across.lead.parted if across.lead is not None else None
    if known is None or found.lead is None or known.line != found.lead.line:
        return found
    has_majority = 2 * len(known.odd) < len(_compared(known))
    return across if has_majority and len(set(known.odd) & set(two)) == 1 else found


def _is_odd_known(found: Parted, lead: Lead | None) -> bool:
    """True where one side has the majority, and no other rank is known to have left something out."""
    over = _over(lead) if lead is not None else ()
    return bool(found.odd) and not (over and set(found.odd).isdisjoint(over))


def _with_only_own_way(
    verdict: Verdict, habit: Parted, flows: Mapping[int, Flow], readable: Collection[str]
) -> Verdict:
    """The branch at which one rank alone went another way than before, past the one at which all part each time."""
    try:
        line = habit.led_to or habit.line
        ways = {rank: left_own_way(flow, rank, line, may_return=True) for rank, flow in flows.items()}
    except ValueError:
        return verdict
    # A loop that ends does so on each rank some day.
    left = [
        found
        for found in ways.values()
        if found is not None and not is_loop(found.line.file, found.line.line, readable)
    ]
    return _led_by(verdict, verdict.lead, left[0], readable) if verdict.lead is not None and len(left) == 1 else verdict


def _with_own_part(verdict: Verdict, flows: Mapping[int, Flow], readable: Collection[str]) -> Verdict:
    """Where one rank is known to have compiled something else: what it did otherwise than before, in its own part."""
    lead = verdict.lead
    if lead is None or lead.cause in _CONSEQUENCES or not lead.is_rank_known or len(lead.ranks) != 1:
        return verdict
    try:
        found = left_own_part(flows, lead.ranks[0]) if lead.ranks[0] in flows else None
    except ValueError:
        return verdict
    return verdict if found is None else _led_by(verdict, lead, found, readable)


def _with_own_branch(
    verdict: Verdict, flows: Mapping[int, Flow], readable: Collection[str], *, may_be_between: bool = False
) -> Verdict:
    """Where one rank is known to have left something out: the branch at which it went another way than before.

    It may have done so between two times at the line, where it has come there again since.
    """
    lead = verdict.lead
    if lead is None or lead.line is None or not _over(lead) or lead.ranks[0] not in flows:
        return verdict
    rank, lines = lead.ranks[0], [*filter(None, (lead.line, lead.left_out))]  # it may have called what leads there
    ways = (left_own_way, left_own_pass) if may_be_between else (left_own_way,)
    try:
        found = first(filter(None, (way(flows[rank], rank, line) for way in ways for line in lines)))
    except ValueError:
        return verdict
    return verdict if found is None else _led_by(verdict, lead, found, readable)


def _with_branch(
    verdict: Verdict, flows: Mapping[int, Flow], readable: Collection[str], *, is_same_program: bool = True
) -> Verdict:
    ranks = verdict.lead.ranks if verdict.lead is not None else ()
    is_elsewhere = bool(ranks) and flows.keys().isdisjoint(ranks)
    if verdict.lead is None or is_elsewhere:  # the rank to blame is of a different domain, or left nothing
        return verdict
    compiled = [one for one in verdict.divergences if one.is_red and one.cause is verdict.lead.cause]
    # What differs is named there; what is said of a collective has words of ours only.
    is_of_content = bool(compiled) or verdict.lead.cause not in _CONSEQUENCES
    texts = [verdict.lead.says, *(one.guard for one in compiled[:1])] if is_of_content else []
    try:
        found = parted(
            flows, readable, _WORD.findall(" ".join(texts)), is_same_program=is_same_program,
            is_of_sizes=verdict.lead.cause is Cause.COLLECTIVE_SIZES, over=_over(verdict.lead),
            is_of_values=verdict.lead.cause is Cause.AGREED_VALUES, alike=_alike(verdict.lead, compiled, flows),
        )  # fmt: skip
    except ValueError:  # a peer sent what is no flow: the verdict stands without it
        return verdict
    if found is None:
        return verdict
    is_of_sizes = _is_data(found) and verdict.lead.cause in _OF_SIZES
    # Ranks that wait in a ring issued the same, in different orders, or one of them what is due elsewhere.
    is_of_ring = flows.keys() <= set(ranks) or (found.is_linked and 0 < len(found.odd) < len(ranks) > 1)
    is_of_ring &= set(found.odd) <= set(ranks)
    is_ring = verdict.lead.cause is Cause.STUCK_COLLECTIVE and verdict.lead.is_rank_known and is_of_ring
    # One line may issue more on one rank than on others, by what it was given: both then name the same rank. Where no
    # rank left anything out, what they issued differs by what it was made of.
    is_agreed = (found.is_linked or found.is_recent) and bool(found.odd) and found.odd == verdict.lead.ranks
    is_made_of = found.is_linked and verdict.lead.cause in _OF_SIZES and not verdict.lead.is_rank_known
    # Where the ranks compiled other collectives they have issued none of these, and what ran before explains it.
    is_explained = found.is_uneven or is_of_sizes or is_ring or is_agreed or is_made_of or bool(compiled)
    if verdict.lead.cause in _OF_COLLECTIVES and not is_explained:
        return verdict
    return _led_by(verdict, verdict.lead, found, readable)


def _alike(lead: Lead, compiled: Sequence[Divergence], ranks: Collection[int]) -> list[tuple[int, ...]]:
    """Ranks that are known to have done the same where others did not: compiled or sent it, or used one group."""
    if compiled:
        return [group.ranks for group in compiled[0].groups]
    is_of_sizes = lead.cause is Cause.COLLECTIVE_SIZES and not lead.is_by_past  # a majority has the same
    if lead.is_rank_known and (is_of_sizes or lead.cause in (Cause.GROUP, Cause.AGREED_VALUES)):
        return [tuple(rank for rank in ranks if rank not in lead.ranks), lead.ranks]
    return []


def _over(lead: Lead) -> tuple[int, ...]:
    """The rank that is known to have left something out: what it has not executed, it will not."""
    is_left_out = lead.is_rank_known and lead.left_out is not None and len(lead.ranks) == 1
    return lead.ranks if is_left_out else ()


def _led_by(verdict: Verdict, before: Lead, found: Parted, readable: Collection[str]) -> Verdict:
    found = _with_code(found, readable)
    are_all_two = verdict.world_size == _A_PAIR
    if are_all_two and before.cause not in _CONSEQUENCES | _FAULTS and found.usual is None:
        before = before.model_copy(update={"is_rank_known": False})  # what it compiled alone the other one may lack
    everyone = (0, 1) if are_all_two else _compared(found)
    has_majority = before.cause is Cause.AGREED_VALUES and before.is_rank_known  # of ranks that have the same value
    odd = before.ranks if has_majority else found.odd
    is_outvoted = len(everyone) < 2 or 0 < 2 * len(odd) < len(everyone)  # not one against one, or two against two
    lead = _lead(before, found, odd) if is_outvoted else _lead_of_split(before, found, everyone)
    checks = verdict.checks
    if lead.parted is not None and lead.cause in (Cause.PARTED, Cause.RAISED):
        follows = {"is_consequence": True}
        ended = [check.model_copy(update=follows) if check.is_red and check.id in CAUSES else check for check in checks]
        checks = (_check(lead), *ended)
    return verdict.model_copy(update={"lead": lead, "summary": leading.summary(lead), "checks": checks})


def _check(lead: Lead) -> Check:
    return Check(
        id=CheckId.SAME_BRANCHES,
        status=Status.FAIL,
        expected="one way through the program",
        observed=lead.says,
        line=lead.line,
        ranks=lead.ranks,
        is_rank_known=lead.is_rank_known,
        cause=lead.cause,
    )


def _lead_of_split(before: Lead, found: Parted, everyone: tuple[int, ...]) -> Lead:
    """Without a majority no past says who is wrong: what changed may have been due. It is said who did as before."""
    sides = tuple(
        side.model_copy(update={"is_as_before": bool(found.odd) and set(found.odd).isdisjoint(side.ranks)})
        for side in found.sides
    )
    is_fact = before.is_rank_known and not before.is_by_past
    found = found.model_copy(update={"sides": sides})
    lead = _lead(before.model_copy(update={"is_rank_known": is_fact}), found, ())
    return lead if lead.is_rank_known else lead.model_copy(update={"ranks": everyone})


def _lead(before: Lead, found: Parted, odd: tuple[int, ...]) -> Lead:
    """The lead that begins with the branch, and blames the `odd` ranks."""
    decided = found.led_to or found.line
    raised_at = before.line if before.cause in (Cause.RAISED, Cause.UNKNOWN) else None  # the gate's has no cause
    if raised_at is not None and (raised_at.file, raised_at.function) == (decided.file, _name(decided)):
        return before  # the ranks parted because this one raised
    is_aside = found.is_habit and bool(before.ranks) and set(odd).isdisjoint(before.ranks)  # a role, no fault
    is_known = before.is_rank_known and before.cause not in _RAISED
    ranks = (() if is_aside else odd) or (before.ranks if is_known else ())
    update = {"ranks": ranks or _compared(found), "is_rank_known": bool(ranks), "line": found.line, "parted": found}
    if before.cause not in _CONSEQUENCES or _is_data(found):
        seen_at = before.line if before.line != found.line else None
        do_first = _do_first(before, found)
        return before.model_copy(update={**update, "seen_at": seen_at, "do_first": do_first})
    consequence = leading.cause_text(before)
    says = f"{'; '.join(map(side_text, found.sides))}{usual_text(found)}{led_to_text(found)}; so {consequence}"
    has_raised = any(side.how == "raises" for side in found.sides)
    cause = Cause.RAISED if has_raised else Cause.PARTED
    return before.model_copy(
        update={**update, "cause": cause, "says": says, "consequence": consequence, "do_first": cause.advice}
    )


def _compared(found: Parted) -> tuple[int, ...]:
    return tuple(sorted(rank for side in found.sides for rank in side.ranks))


def _do_first(before: Lead, found: Parted) -> str:
    """What to do where the ranks parted, and then what is done about what came of it."""
    here = _EQUAL_VALUES if _is_data(found) else leading.first_sentence(Cause.PARTED.advice)
    is_same = before.cause is Cause.PYTHON_VALUE or not before.do_first
    return here if is_same else f"{here} Or: {before.do_first}"


def _is_data(found: Parted) -> bool:
    """True where the ranks executed the same lines with different values."""
    return any(side.how == "value" for side in found.sides)


def _name(line: UserLine) -> str:
    """The function without its class, as in a traceback."""
    return line.function.rpartition(".")[2]


def usual_text(found: Parted) -> str:
    """`, where it went on at stages.py:46 before`; empty where ranks are compared with each other."""
    usual = found.usual
    return f", where it {_way_text(usual, _DID)} before" if usual is not None else ""


def led_to_text(found: Parted) -> str:
    """`; this decides trainer.py:60 in run`; empty for a branch that decided no other one."""
    line = found.led_to
    return f"; this decides {PurePath(line.file).name}:{line.line} in {line.function}" if line is not None else ""


def side_text(side: Went) -> str:
    """`rank 0 with slot = 0 enters execute_batch (engine.py:34), then draft x3`; `ranks 0-1 enter`."""
    given = f" with {side.given}" if side.given else ""
    does = _way_text(side, _DOES)
    verb, _, rest = does.partition(" ")
    several = _PLURAL.get(verb, verb.removesuffix("s")) if len(side.ranks) > 1 else verb
    before = ", as all did before" if side.is_as_before else ""
    return f"{named_ranks(side.ranks)}{given} {several} {rest}{before}"


def _way_text(side: Went, verbs: Mapping[str, str]) -> str:
    line = side.line
    place = f"{PurePath(line.file).name}:{line.line}" if line is not None else ""
    name = line.function if line is not None else ""
    does = verbs[side.how].format(place=place, name=name, value=side.value)
    then = f", then {', '.join(side.calls)}" if side.calls else ""
    return f"{does}{then}"


def _with_code(found: Parted, readable: Collection[str]) -> Parted:
    sides = tuple(side.model_copy(update={"line": _coded(side.line, readable)}) for side in found.sides)
    usual = found.usual and found.usual.model_copy(update={"line": _coded(found.usual.line, readable)})
    lines = {name: _coded(getattr(found, name), readable) for name in ("line", "led_to")}
    return found.model_copy(update={**lines, "sides": sides, "usual": usual})


def _coded(line: UserLine | None, readable: Collection[str]) -> UserLine | None:
    if line is None or line.file not in readable:
        return line
    return line.model_copy(update={"code": linecache.getline(line.file, line.line).strip()})
