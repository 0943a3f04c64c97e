"""`RankDigest`s of all ranks -> every guard, graph constant and read that depends on the rank, agreeing or not.

Values decide before names do: what differs across ranks is certain, what is equal on ranks that differ cannot be
the rank.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from tpcompile.evidence.align import Slot, align
from tpcompile.evidence.bygroup import Items, Row
from tpcompile.evidence.byrank import ByRank, Groups
from tpcompile.evidence.domain import Allowed, Domain, Fetch, by_domain, reason_for, sides
from tpcompile.evidence.records import (
    Grade,
    Item,
    ItemKind,
    Layer,
    RankDigest,
    RankRead,
    Taint,
    TaintKind,
    items_of,
    value_item,
)
from tpcompile.evidence.rows import rows_of
from tpcompile.evidence.several import find, first, grouped, listed, phrase, unlike

RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "PMI_RANK",
    "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "HOSTNAME",
})  # fmt: skip
"""Variables that differ by nature: listed when traced code reads them, whatever they hold today."""

_NUMBER = re.compile(r"(?<![\w.%#\[])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.\]])")
_STRING = re.compile(r"'[^']*'")
_NUMBERS: Mapping[TaintKind, Callable[[RankDigest], int | None]] = {
    TaintKind.RANK: lambda digest: digest.rank,
    TaintKind.GROUP_RANK: lambda digest: digest.coordinate,
    TaintKind.LOCAL_RANK: lambda digest: digest.places.get("local rank"),
    TaintKind.DEVICE_INDEX: lambda digest: digest.places.get("device index"),
}
"""Numbers that tell ranks apart."""
_MAY_BE_EQUAL = frozenset({TaintKind.ENVIRONMENT, TaintKind.HOSTNAME})
_LAYERS = {"guard": "guards", "constant": "graph", "read": "taint"}
"""The layer under which an entry of the allow-list may name a taint."""
_TENSOR = "make it tensor data: register a buffer in __init__ and index or multiply with that"
_SUGGESTIONS = {
    TaintKind.DIFFERS: "make the value equal on all ranks, or make it tensor data (a registered buffer)",
    TaintKind.RANK: f"move it out of the compiled region, or {_TENSOR}",
    TaintKind.GROUP_RANK: f"move it out of the compiled region, or {_TENSOR}",
    TaintKind.LOCAL_RANK: f"move it out of the compiled region, or {_TENSOR}",
    TaintKind.DEVICE_INDEX: "pass the device itself (x.device), not its index",
    TaintKind.HOSTNAME: "read it before the compiled region and keep it out of the program",
    TaintKind.ENVIRONMENT: "read the variable once in __init__, and set it equal on all ranks or keep it in a buffer",
    TaintKind.PID: "read it before the compiled region and keep it out of the program",
}


def find_taints(digests: Sequence[RankDigest], fetch: Fetch, *, allowed: Allowed = ()) -> tuple[Taint, ...]:
    """Every taint once, the surest first. `fetch` is asked for guards and graphs only where their hashes differ.

    An entry of `allowed` gives its reason to a taint when its layer is `taint`, or the layer of a guard or constant,
    and the taint's text or line contains its text.
    """
    found: list[Taint] = []
    for name, ranks in by_domain(digests).items():
        found += _Tainted(Domain(name, ranks, fetch)).taints()
    order = list(Grade)
    reasoned = [taint.model_copy(update={"reason": _reason(taint, allowed)}) for taint in _once(found)]
    return tuple(sorted(reasoned, key=lambda t: (order.index(t.grade), str(t.line), t.text)))


def _once(taints: Sequence[Taint]) -> list[Taint]:
    """Each taint of a line once, the first compile's: a recompile bakes the same constant into another node."""
    by_subject = grouped(taints, lambda taint: (taint.what, taint.kind, str(taint.line), _subject(taint)))
    return [same[0] for same in by_subject.values()]


def _subject(taint: Taint) -> str:
    """What tells taints of one line apart; a constant is told by its line, where it has one."""
    return "" if taint.what == "constant" and taint.line is not None else taint.text


def _reason(taint: Taint, allowed: Allowed) -> str:
    layers = {"taint", _LAYERS[taint.what]}
    code = taint.line.code if taint.line else ""
    text = f"{taint.text} at {taint.line} {code}"
    return reason_for(layers, [text], allowed)


class _Tainted:
    """Ranks that must agree, and what of them depends on the rank."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.ranks = domain.ranks
        self.numbers = {kind: self.numbers_by(number) for kind, number in _NUMBERS.items()}

    def numbers_by(self, number: Callable[[RankDigest], int | None]) -> ByRank[str]:
        """A number of every rank; nothing unless all know theirs."""
        known = self.domain.digests.found(number)
        return known.map(str) if len(known) == len(self.ranks) else ByRank({})

    def taints(self) -> list[Taint]:
        """Constants with the read that made them, guards with the read that asked for them, then what is left."""
        slots = align(self.ranks)
        reads = [self.read(seen) for seen in self.suspects("read") if not _is_setting(seen)]
        differing = itertools.chain(*map(self.constants, slots), *map(self.guards, slots))
        observed = [_explained(taint, reads) for taint in differing]
        left = unlike(reads, observed, lambda taint: (taint.kind, str(taint.line)))
        named = unlike(self.named(), observed, lambda taint: (taint.text, taint.line))
        return [*observed, *left, *named]

    def guards(self, slot: Slot) -> Iterator[Taint]:
        """Guards about one value that say different things."""
        groups = slot.groups(Layer.GUARDS)
        # A different program has different guards: a consequence, not a cause.
        is_same_program = len(slot.groups(Layer.GRAPH)) == 1
        for row in self.rows(slot, Layer.GUARDS, groups):
            is_own = row.is_full or is_same_program
            if is_own and _is_of_python(row):
                yield _observed("guard", self.kind_of_guard(row, groups), row.first.about, row, groups, slot)

    def kind_of_guard(self, row: Row, groups: Groups) -> TaintKind:
        """What the values are that a guard compares with."""
        is_variable = "variable" in row.first.notes
        return TaintKind.ENVIRONMENT if is_variable else self.kind_of(_by_rank(groups, row.notes("value")))

    def constants(self, slot: Slot) -> Iterator[Taint]:
        """Nodes that are equal but for numbers, or texts, in their arguments."""
        groups = slot.groups(Layer.GRAPH)
        rows = self.rows(slot, Layer.GRAPH, groups)
        if not all(map(_differs_in_constants, rows)):
            return  # other ops: another program, which the graph layer reports
        for row in rows:
            calls = list(map(_call, row.present))
            kind = self.kind_of_constant(groups, calls)
            yield _observed("constant", kind, listed(calls, by=" / ", at_most=2), row, groups, slot)

    def rows(self, slot: Slot, layer: Layer, groups: Groups) -> tuple[Row, ...]:
        """What differs in one layer of one compile; nothing when the hashes agree."""
        if len(groups) < 2:
            return ()
        items = self.domain.leaders(slot.compiles, groups).map(lambda seen: seen.items(layer))
        return rows_of(Items(items), is_ordered=layer == Layer.GRAPH)

    def kind_of_constant(self, groups: Groups, calls: Sequence[str]) -> TaintKind:
        """What the first number is that follows the ranks."""
        columns = zip(*map(_NUMBER.findall, calls), strict=False)
        kinds = [self.kind_of(_by_rank(groups, column)) for column in columns]
        return min(kinds, key=lambda kind: kind == TaintKind.DIFFERS, default=TaintKind.DIFFERS)

    def kind_of(self, values: ByRank[str]) -> TaintKind:
        """Which number of the ranks these values are, on every rank and with at least two of them distinct."""
        if values.differ():
            for kind, numbers in self.numbers.items():
                if values.items() <= numbers.items():
                    return kind
        return TaintKind.DIFFERS

    def read(self, seen: ByRank[RankRead]) -> Taint:
        """A read in traced code, of one line and text over all ranks and compiles."""
        reads = seen.map(lambda read: read.value)
        shown = seen.first
        # torch says what a rank read gives; of a host or variable only a difference shows that it matters.
        matters = shown.kind not in _MAY_BE_EQUAL or reads.differ()
        is_sure = not shown.receiver and bool(seen.where(lambda read: read.is_sure))
        grade = Grade.CERTAIN if is_sure and matters else Grade.LIKELY
        # By the number of that kind, where the rank did not say what it read.
        numbers = self.numbers.get(shown.kind, ByRank({}))
        values = {rank: value or numbers.get(rank, "") for rank, value in reads.items()}
        return _of_suspect(shown, grade, ByRank(values))

    def named(self) -> Iterator[Taint]:
        """Guards on a value with a rank's name that say the same on every rank."""
        for seen in self.suspects("guard"):
            suspect = seen.first
            if len(seen) == len(self.ranks) and self.could_be_rank(suspect.value):
                yield _of_suspect(suspect, Grade.POSSIBLE, ByRank(dict.fromkeys(seen, "")))

    def could_be_rank(self, value: str) -> bool:
        """False for a number no rank has (a LoRA rank of 16); a value that is no number says nothing."""
        if not value.lstrip("-").isdigit():
            return True
        return 0 <= int(value) < max(2, len(self.ranks), self.ranks[-1].rank + 1)

    def suspects(self, what: str) -> list[ByRank[RankRead]]:
        """Suspects of one kind, those of one text and line together, each with the rank that has it."""
        found: dict[tuple[str, str], dict[int, RankRead]] = {}
        for digest in self.ranks:
            for suspect in digest.suspects_of(what):
                found.setdefault((suspect.text, str(suspect.line)), {})[digest.rank] = suspect
        return list(map(ByRank, found.values()))


def _is_setting(seen: ByRank[RankRead]) -> bool:
    """True for a variable that is equal everywhere: an ordinary setting."""
    read = seen.first
    is_variable = read.kind == TaintKind.ENVIRONMENT and read.variable not in RANK_VARIABLES
    return is_variable and not seen.differ(lambda read: read.value)


def _explained(taint: Taint, reads: Sequence[Taint]) -> Taint:
    """The taint with kind, and line where it has none, of the read that caused it."""
    read = find(reads, lambda read: _is_asked_by(taint, read))
    if read is None:
        return taint
    changes = {
        "kind": read.kind,
        "line": read.line,
        "text": f"{taint.text}, from {read.text}",
        "suggestion": read.suggestion,
    }
    return taint.model_copy(update=changes)


def _is_asked_by(taint: Taint, read: Taint) -> bool:
    """True for a read on the line of the taint, or of the variable that its guard compares."""
    is_same_line = taint.line is not None and str(read.line) == str(taint.line)
    return is_same_line or read.variable in {item.notes.get("variable") for _, item in items_of(taint.groups)}


def _of_suspect(suspect: RankRead, grade: Grade, values: ByRank[str]) -> Taint:
    """A suspect with what it gives on each rank, where that is known."""
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
        suggestion=_SUGGESTIONS[suspect.kind],
    )


def _observed(
    what: Literal["guard", "constant"], kind: TaintKind, text: str, row: Row, groups: Groups, slot: Slot
) -> Taint:
    """A value in a compile that was seen to differ."""
    return Taint(
        what=what,
        kind=kind,
        grade=Grade.CERTAIN,
        text=text,
        where=phrase(slot.phase, slot.frame),
        line=first(row.lines),
        groups=sides(groups, row),
        suggestion=_SUGGESTIONS[kind],
    )


def _is_of_python(row: Row) -> bool:
    """True for guards on a Python value: tensors and the state of the process have findings of their own."""
    return row.first.kind == ItemKind.GUARD and "keys" not in row.first.notes


def _by_rank(groups: Groups, values: Sequence[str]) -> ByRank[str]:
    """Values of groups, of those that have one."""
    found: dict[int, str] = {}
    for ranks, value in zip(groups, values, strict=True):
        if value:
            found |= dict.fromkeys(ranks, value)
    return ByRank(found)


def _differs_in_constants(row: Row) -> bool:
    """True for nodes that are one op on the same operands, with other numbers or texts."""
    return row.agree_in(_skeleton)


def _skeleton(item: Item) -> tuple[str, ...]:
    """What an item says without the numbers and texts an argument may hold."""
    fields = item.fields
    if item.kind != ItemKind.NODE:
        return item.key
    args = _STRING.sub("'#'", _NUMBER.sub("#", fields["args"]))
    return fields["op"], fields["target"], args, fields["value"]


def _call(item: Item) -> str:
    """`mul(%1, 3)` of a node."""
    return f"{item.fields['target']}({item.fields['args']})"


def value_text(item: Item) -> str:
    """What one group of ranks has: the value a guard compares with, the call, or what was read."""
    if item.kind == ItemKind.NODE:
        return _call(item)
    return item.notes.get("value") or item.says
