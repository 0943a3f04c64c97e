"""`RankDigest`s of all ranks -> every guard, graph constant and read that depends on the rank, and one check of them.

Values count before names: a value that differs between ranks is certain, one that is equal on all ranks is not the
rank.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Literal

from tpcompile.evidence.groups.align import Slot, align
from tpcompile.evidence.groups.by_group import Items, Row
from tpcompile.evidence.groups.by_rank import ByRank, Groups
from tpcompile.evidence.groups.domain import Allowed, Domain, Fetch, by_domain, reason_for, sides
from tpcompile.evidence.iterables import find, first, indexed, unlike
from tpcompile.evidence.judgement.checks import phase_prefix
from tpcompile.evidence.layers.differing_items import rows_of
from tpcompile.evidence.records import (
    Check,
    CheckId,
    Grade,
    Item,
    ItemKind,
    Layer,
    RankDigest,
    RankRead,
    Status,
    Taint,
    TaintKind,
    items_of,
    ranks_of,
    value_item,
)
from tpcompile.evidence.records.base import at_text, lines_of
from tpcompile.evidence.records.bounds import MAX_RANKS
from tpcompile.evidence.text.phrases import listed, phrase
from tpcompile.evidence.text.ranks import named_ranks

RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "PMI_RANK",
    "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "HOSTNAME",
})  # fmt: skip
"""Variables that differ between ranks by design: listed whenever traced code reads them, whatever their values."""

_NUMBER = re.compile(r"(?<![\w.%#\[])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.\]])")
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
_STRING = re.compile(r"'[^']*'")
_NUMBERS: Mapping[TaintKind, Callable[[RankDigest], int | None]] = {
    TaintKind.RANK: lambda digest: digest.rank,
    TaintKind.GROUP_RANK: lambda digest: digest.coordinate,
    TaintKind.LOCAL_RANK: lambda digest: digest.places.get("local rank"),
    TaintKind.DEVICE_INDEX: lambda digest: digest.places.get("device index"),
}
"""Numbers that differ between ranks."""
_MAY_BE_EQUAL = frozenset({TaintKind.ENVIRONMENT, TaintKind.HOSTNAME})
_LAYERS = {"guard": "guards", "constant": "graph", "read": "taint"}
"""The layer under which an entry of the allow-list may name a taint."""
_BUFFER = "keep it in a tensor: register a buffer in __init__ and multiply with that"
SUGGESTIONS = {
    TaintKind.DIFFERS: "make the value equal on all ranks; one that is meant to differ goes into a registered buffer",
    TaintKind.RANK: _BUFFER,
    TaintKind.GROUP_RANK: _BUFFER,
    TaintKind.LOCAL_RANK: _BUFFER,
    TaintKind.ENVIRONMENT: "set the variable equal on all ranks, or read it in __init__ and keep it in a buffer",
}
"""Each has a program in tests/advice; nothing is suggested for the other kinds."""

_ALLOWED = "allowed"
_KINDS = (*(grade.value for grade in Grade), _ALLOWED)


def find_taints(digests: Sequence[RankDigest], fetch: Fetch, *, allowed: Allowed = ()) -> tuple[Taint, ...]:
    """Every taint once, the surest first. Guards and graphs are fetched only where their hashes differ.

    An entry of `allowed` gives its reason to a taint if its layer is `taint`, or that of the guard or constant, and the
    taint's text or line contains its text.
    """
    found: list[Taint] = []
    for name, ranks in by_domain(digests).items():
        domain = Domain(name, ranks, fetch)
        found += _Tainted(domain).taints()
    # Each taint of a line once, that of the first compile: a recompile has the same constant in a different node.
    once: dict[Hashable, Taint] = {}
    for taint in found:
        is_one_of_line = taint.what == "constant" and taint.line is not None
        subject = "" if is_one_of_line else taint.text
        once.setdefault((taint.what, taint.kind, str(taint.line), subject), taint)
    order = list(Grade)
    reasoned = [taint.changed(reason=_reason(taint, allowed)) for taint in once.values()]
    return tuple(sorted(reasoned, key=lambda t: (order.index(t.grade), str(t.line), t.text)))


def _reason(taint: Taint, allowed: Allowed) -> str:
    layers = {"taint", _LAYERS[taint.what]}
    code = taint.line.code if taint.line else ""
    text = f"{taint.text} at {taint.line} {code}"
    return reason_for(layers, [text], allowed)


class _Tainted:
    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.ranks = domain.ranks
        self.numbers: dict[TaintKind, ByRank[str]] = {}
        """Numbers of every rank; none where the number of any rank is not known."""
        for kind, number in _NUMBERS.items():
            known = domain.digests.found(number)
            if len(known) == len(self.ranks):
                self.numbers[kind] = known.map(str)

    def taints(self) -> list[Taint]:
        """Constants and guards, each with the read that it comes from, then the other reads, then guards by name."""
        slots = align(self.ranks)
        reads: list[Taint] = []
        for seen in self.suspects("read"):
            is_variable = seen.first.kind == TaintKind.ENVIRONMENT and seen.first.variable not in RANK_VARIABLES
            is_setting = is_variable and not seen.differ(lambda read: read.value)
            if not is_setting:
                reads.append(self.read(seen))
        differing = itertools.chain(*map(self.constants, slots), *map(self.guards, slots))
        asking = _Asking(reads)
        observed = [asking.explained(taint) for taint in differing]
        left = unlike(reads, observed, lambda taint: (taint.kind, str(taint.line)))
        named = unlike(self.named(), observed, lambda taint: (taint.text, taint.line))
        return [*observed, *left, *named]

    def guards(self, slot: Slot) -> Iterator[Taint]:
        """Guards on one Python value that differ."""
        groups = slot.groups(Layer.GUARDS)
        # Guards that only some ranks have are a consequence where the programs differ.
        is_same_program = len(slot.groups(Layer.GRAPH)) == 1
        for row in self.rows(slot, Layer.GUARDS, groups):
            is_consequence = not (row.is_full or is_same_program)
            # Tensors and the state of the process have findings of their own.
            is_of_python = row.first.kind == ItemKind.GUARD and "keys" not in row.first.notes
            if is_consequence or not is_of_python:
                continue
            kind = TaintKind.ENVIRONMENT
            if "variable" not in row.first.notes:
                kind = self.kind_of(_by_rank(groups, row.notes("value")))
            yield _observed("guard", kind, row.first.about, row, groups, slot)

    def constants(self, slot: Slot) -> Iterator[Taint]:
        """Nodes that differ only in numbers or strings among their arguments."""
        groups = slot.groups(Layer.GRAPH)
        rows = self.rows(slot, Layer.GRAPH, groups)
        if not all(row.agree_in(_skeleton) for row in rows):
            return  # different ops: a different program, which the graph layer reports
        for row in rows:
            calls = list(map(_call, row.present))
            # Which number of the ranks the first matching constant of the calls equals.
            columns = zip(*map(_NUMBER.findall, calls), strict=False)
            kinds = [self.kind_of(_by_rank(groups, column)) for column in columns]
            kind = find(kinds, lambda kind: kind != TaintKind.DIFFERS) or TaintKind.DIFFERS
            yield _observed("constant", kind, listed(calls, by=" / ", at_most=2), row, groups, slot)

    def rows(self, slot: Slot, layer: Layer, groups: Groups) -> tuple[Row, ...]:
        """Rows that differ in one layer of one compile; empty when the hashes agree."""
        if len(groups) < 2:
            return ()
        items = self.domain.leaders(slot.compiles, groups).map(lambda seen: seen.items(layer))
        return rows_of(Items(items), is_ordered=layer == Layer.GRAPH)

    def kind_of(self, values: ByRank[str]) -> TaintKind:
        """The number of the ranks that these values equal on every rank; DIFFERS for none, or where all are equal."""
        if not values.differ():
            return TaintKind.DIFFERS
        same = find(self.numbers, lambda kind: values.items() <= self.numbers[kind].items())
        return same or TaintKind.DIFFERS

    def read(self, seen: ByRank[RankRead]) -> Taint:
        """The taint of one read in traced code, given by rank."""
        reads = seen.map(lambda read: read.value)
        shown = seen.first
        # Where the value that a rank read was not recorded, its number of that kind is taken.
        numbers = self.numbers.get(shown.kind, ByRank({}))
        values: dict[int, str] = {}
        for rank, value in reads.items():
            values[rank] = value or numbers.get(rank, "")
        grade = _grade_of_read(seen)
        return _of_suspect(shown, grade, ByRank(values))

    def named(self) -> Iterator[Taint]:
        """Guards on a value with a rank's name that are equal on every rank."""
        for seen in self.suspects("guard"):
            suspect = seen.first
            if len(seen) == len(self.ranks) and self.could_be_rank(suspect.value):
                yield _of_suspect(suspect, Grade.POSSIBLE, ByRank(dict.fromkeys(seen, "")))

    def could_be_rank(self, value: str) -> bool:
        """False for a number that no rank has (a LoRA rank of 16); True for anything that is not a number."""
        if not _WHOLE_NUMBER.fullmatch(value):
            return True
        is_short = len(value) <= len(str(MAX_RANKS))
        return is_short and 0 <= int(value) < max(2, len(self.ranks), self.ranks[-1].rank + 1)

    def suspects(self, what: str) -> list[ByRank[RankRead]]:
        """Suspects of one kind: for each text and line, the suspect of every rank that has it."""
        found: dict[tuple[str, str], dict[int, RankRead]] = {}
        for digest in self.ranks:
            for suspect in digest.rank_sources(what):
                by_rank = found.setdefault((suspect.text, str(suspect.line)), {})
                by_rank[digest.rank] = suspect
        return list(map(ByRank, found.values()))


def _grade_of_read(seen: ByRank[RankRead]) -> Grade:
    """Certain for a read of the rank that was traced; of a host name or variable, only where the values differ."""
    may_be_equal = seen.first.kind in _MAY_BE_EQUAL
    if may_be_equal and not seen.differ(lambda read: read.value):
        return Grade.LIKELY
    if seen.first.receiver:  # of an object that is not known
        return Grade.LIKELY
    is_traced = seen.where(lambda read: read.is_sure)
    return Grade.CERTAIN if is_traced else Grade.LIKELY


class _Asking:
    """Reads of the rank, by the line they are on and the variable they read; of several the first counts."""

    def __init__(self, reads: Sequence[Taint]) -> None:
        self.reads = reads
        numbers = range(len(reads) - 1, -1, -1)
        self.by_line = indexed(numbers, lambda number: str(reads[number].line))
        self.by_variable = indexed(numbers, lambda number: reads[number].variable)

    def explained(self, taint: Taint) -> Taint:
        """The taint with the kind, line and suggestion of the read that caused it."""
        variables = [item.notes.get("variable") for _, item in items_of(taint.groups)]
        asking = [self.by_variable.get(variable) for variable in variables if variable is not None]
        if taint.line is not None:
            asking.append(self.by_line.get(str(taint.line)))
        numbers = [number for number in asking if number is not None]
        if not numbers:
            return taint
        read = self.reads[min(numbers)]
        text = f"{taint.text}, from {read.text}"
        return taint.changed(kind=read.kind, line=read.line, text=text, suggestion=read.suggestion)


def _of_suspect(suspect: RankRead, grade: Grade, values: ByRank[str]) -> Taint:
    """The taint of a suspect, with its value on each rank where that is known."""
    row = [value_item("read", value, line=suspect.line) if value else None for _, value in values.sides()]
    return Taint(
        what=suspect.what,
        kind=suspect.kind,
        grade=grade,
        text=suspect.text,
        variable=suspect.variable,
        where=suspect.where,
        line=suspect.line,
        groups=sides(values.groups(), row),
        suggestion=SUGGESTIONS.get(suspect.kind, ""),
    )


def _observed(
    what: Literal["guard", "constant"], kind: TaintKind, text: str, row: Row, groups: Groups, slot: Slot
) -> Taint:
    """The taint of a value that differs in a compile."""
    return Taint(
        what=what,
        kind=kind,
        grade=Grade.CERTAIN,
        text=text,
        where=phrase(slot.phase, slot.frame),
        line=first(row.lines),
        groups=sides(groups, row),
        suggestion=SUGGESTIONS.get(kind, ""),
    )


def _by_rank(groups: Groups, values: Sequence[str]) -> ByRank[str]:
    """The values of groups by rank; groups whose value is empty are left out."""
    found: dict[int, str] = {}
    for ranks, value in zip(groups, values, strict=True):
        found |= dict.fromkeys(ranks, value)
    return ByRank(found).where(bool)


def _skeleton(item: Item) -> tuple[str, ...]:
    """The fields of an item, without the numbers and strings among its arguments."""
    fields = item.fields
    if item.kind != ItemKind.NODE:
        return item.key
    args = _STRING.sub("'#'", _NUMBER.sub("#", fields["args"]))
    return fields["op"], fields["target"], args, fields["value"]


def _call(item: Item) -> str:
    return f"{item.fields['target']}({item.fields['args']})"


def value_text(item: Item) -> str:
    """The value of one group of ranks: what a guard compares with, the call, or what was read."""
    if item.kind == ItemKind.NODE:
        return _call(item)
    return item.notes.get("value") or item.says


def taint_check(mode: str, digests: Sequence[RankDigest], taints: Sequence[Taint], *, fails: bool) -> Check:
    """One check over the taints of a mode: for information, or red when `fails` and a certain one is not allowed."""
    prefix = phase_prefix(mode)
    certain: list[Taint] = []
    others: list[Taint] = []
    for taint in taints:
        if taint.where.startswith(prefix):
            can_fail = taint.grade == Grade.CERTAIN and not taint.reason
            (certain if can_fail else others).append(taint)
    # Taints that can fail the check come first, allowed ones last.
    mine = certain + sorted(others, key=lambda taint: bool(taint.reason))
    status, observed = Status.SKIPPED, "not observed"
    if mine:
        kinds = Counter(_ALLOWED if taint.reason else taint.grade.value for taint in mine)
        counts = [f"{kinds[kind]} {kind}" for kind in sorted(kinds, key=_KINDS.index)]
        status, observed = Status.INFO, f"{', '.join(counts)}; first: {mine[0].text}"
    elif any(digest.compiles for digest in digests):
        status, observed = Status.PASS, "none"
    is_code_seen = any(digest.is_code_seen for digest in digests)
    if not is_code_seen:
        observed = f"{observed}; traced code was not searched"
    check = Check(
        id=CheckId.UNTAINTED,
        mode=mode,
        status=status,
        expected="none, or allowed with a reason",
        observed=observed,
        details=tuple(map(taint_text, mine)),
        line=first(lines_of(mine[:1])),
    )
    is_red = fails and bool(certain)
    if not is_red:
        return check
    return check.changed(status=Status.FAIL, ranks=ranks_of(mine[0].groups))


def taint_text(taint: Taint) -> str:
    """One line of a report: grade, what, kind, where, values, what to do or why it is allowed."""
    values = [f"{named_ranks(ranks)}: {value_text(item)}" for ranks, item in items_of(taint.groups)]
    why = "; ".join([taint.kind.value, *values])
    return f"{taint.grade} {taint.what} {taint.text}{at_text(taint.line)} ({why}): {taint.advice}"
