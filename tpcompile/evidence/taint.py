"""`RankDigest`s of all ranks -> every guard, graph constant and read that depends on the rank, agreeing or not.

Values decide before names do: what differs across ranks is certain, what is equal on ranks that differ cannot be
the rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from tpcompile.evidence.align import Slot, align
from tpcompile.evidence.domain import Allowed, Domain, Fetch, by_domain, group_by, sides
from tpcompile.evidence.layerspec import Groups, Row
from tpcompile.evidence.records import (
    Grade,
    Item,
    ItemKind,
    Layer,
    RankDigest,
    RankRead,
    Taint,
    TaintKind,
    value_item,
)
from tpcompile.evidence.rows import rows_of

RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "PMI_RANK",
    "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "HOSTNAME",
})  # fmt: skip
"""Variables that differ by nature: listed when traced code reads them, whatever they hold today."""

_NUMBER = re.compile(r"(?<![\w.%#\[])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.\]])")
_STRING = re.compile(r"'[^']*'")
_PLACES = {"local rank": TaintKind.LOCAL_RANK, "device index": TaintKind.DEVICE_INDEX}
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
    found: dict[tuple[str, ...], Taint] = {}
    for taint in taints:
        found.setdefault((taint.what, taint.kind, str(taint.line), _subject(taint)), taint)
    return list(found.values())


def _subject(taint: Taint) -> str:
    """What tells taints of one line apart; a constant is told by its line, where it has one."""
    return "" if taint.what == "constant" and taint.line is not None else taint.text


def _reason(taint: Taint, allowed: Allowed) -> str:
    layers = {"taint", _LAYERS[taint.what]}
    code = taint.line.code if taint.line else ""
    text = f"{taint.text} at {taint.line} {code}"
    for layer, contains, reason in allowed:
        if layer in layers and contains in text:
            return reason
    return ""


class _Tainted:
    """Ranks that must agree, and what of them depends on the rank."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.ranks = domain.ranks
        self.numbers: dict[TaintKind, dict[int, str]] = {
            TaintKind.RANK: {d.rank: str(d.rank) for d in self.ranks},
            TaintKind.GROUP_RANK: {d.rank: str(d.coordinate) for d in self.ranks},
        }
        for name, kind in _PLACES.items():
            known = {d.rank: str(d.places[name]) for d in self.ranks if name in d.places}
            self.numbers[kind] = known if len(known) == len(self.ranks) else {}

    def taints(self) -> list[Taint]:
        """Constants with the read that made them, guards with the read that asked for them, then what is left."""
        slots = align(self.ranks)
        reads = list(self.reads())
        constants = [_explained(taint, reads) for slot in slots for taint in self.constants(slot)]
        guards = [_explained(taint, reads) for slot in slots for taint in self.guards(slot)]
        told = {(taint.kind, str(taint.line)) for taint in (*constants, *guards)}
        left = [read for read in reads if (read.kind, str(read.line)) not in told]
        seen = {(guard.text, guard.line) for guard in guards}
        named = [taint for taint in self.named() if (taint.text, taint.line) not in seen]
        return [*constants, *guards, *left, *named]

    def guards(self, slot: Slot) -> Iterator[Taint]:
        """Guards about one value that say different things."""
        groups = slot.groups(Layer.GUARDS)
        is_same_program = len(slot.groups(Layer.GRAPH)) == 1
        for row in self.rows(slot, Layer.GUARDS, groups):
            if not _is_of_python(row.first):
                continue  # tensors and the state of the process have findings of their own
            # Another program has other guards: a consequence, not a cause.
            if row.is_full or is_same_program:
                is_variable = bool(row.first.notes.get("variable"))
                kind = TaintKind.ENVIRONMENT if is_variable else self.kind_of(_by_rank(groups, row.notes("value")))
                yield _observed("guard", kind, row.first.about, row, groups, slot)

    def constants(self, slot: Slot) -> Iterator[Taint]:
        """Nodes that are equal but for numbers, or texts, in their arguments."""
        groups = slot.groups(Layer.GRAPH)
        rows = self.rows(slot, Layer.GRAPH, groups)
        if not all(map(_differs_in_constants, rows)):
            return  # other ops: another program, which the graph layer reports
        for row in rows:
            calls = list(map(_call, row.present))
            yield _observed("constant", self.kind_of_constant(groups, calls), _listed(calls), row, groups, slot)

    def rows(self, slot: Slot, layer: Layer, groups: Groups) -> tuple[Row, ...]:
        """What differs in one layer of one compile; nothing when the hashes agree."""
        if len(groups) < 2:
            return ()
        items = tuple(self.domain.items(ranks[0], slot.compiles[ranks[0]].index, layer) for ranks in groups)
        return rows_of(items, is_ordered=layer == Layer.GRAPH)

    def kind_of_constant(self, groups: Groups, calls: Sequence[str]) -> TaintKind:
        """What the first number is that follows the ranks."""
        columns = zip(*map(_NUMBER.findall, calls), strict=False)
        kinds = [self.kind_of(_by_rank(groups, column)) for column in columns]
        known = [kind for kind in kinds if kind != TaintKind.DIFFERS]
        return known[0] if known else TaintKind.DIFFERS

    def kind_of(self, values: dict[int, str]) -> TaintKind:
        """Which number of the ranks these values are, on every rank and with at least two of them distinct."""
        if len(set(values.values())) < 2:
            return TaintKind.DIFFERS
        for kind, numbers in self.numbers.items():
            if values.items() <= numbers.items():
                return kind
        return TaintKind.DIFFERS

    def reads(self) -> Iterator[Taint]:
        """Reads in traced code, by line and text over all ranks and compiles."""
        for seen in self.suspects("read").values():
            reads = list(seen.values())
            differs = len({read.value for read in reads}) > 1
            is_setting = reads[0].kind == TaintKind.ENVIRONMENT and reads[0].variable not in RANK_VARIABLES
            if is_setting and not differs:
                continue  # equal everywhere: an ordinary setting
            # torch says what a rank read gives; of a host or variable only a difference shows that it matters.
            matters = differs or reads[0].kind not in _MAY_BE_EQUAL
            is_sure = any(read.is_sure for read in reads) and not reads[0].receiver
            values = {rank: self.value(rank, read) for rank, read in seen.items()}
            yield _of_suspect(reads[0], Grade.CERTAIN if is_sure and matters else Grade.LIKELY, values)

    def named(self) -> Iterator[Taint]:
        """Guards on a value with a rank's name that say the same on every rank."""
        for seen in self.suspects("guard").values():
            first = next(iter(seen.values()))
            if len(seen) == len(self.ranks) and self.could_be_rank(first.value):
                yield _of_suspect(first, Grade.POSSIBLE, dict.fromkeys(seen, ""))

    def could_be_rank(self, value: str) -> bool:
        """False for a number no rank has (a LoRA rank of 16); a value that is no number says nothing."""
        if not value.lstrip("-").isdigit():
            return True
        return 0 <= int(value) < max(2, len(self.ranks), self.ranks[-1].rank + 1)

    def suspects(self, what: str) -> dict[tuple[str, str], dict[int, RankRead]]:
        """Suspects of one kind by text and line, each with the ranks that have it."""
        found: dict[tuple[str, str], dict[int, RankRead]] = {}
        for digest in self.ranks:
            for suspect in digest.suspects:
                if suspect.what == what:
                    seen = found.setdefault((suspect.text, str(suspect.line)), {})
                    seen[digest.rank] = _surer(seen.get(digest.rank), suspect)
        return found

    def value(self, rank: int, suspect: RankRead) -> str:
        """What the read gives on a rank, by its kind where the rank did not say."""
        return suspect.value or self.numbers.get(suspect.kind, {}).get(rank, "")


def _explained(taint: Taint, reads: Sequence[Taint]) -> Taint:
    """The taint with kind, and line where it has none, of the read that caused it."""
    variables = {group.item.notes.get("variable") for group in taint.groups if group.item}
    for read in reads:
        is_same_line = taint.line is not None and str(read.line) == str(taint.line)
        if is_same_line or read.variable in variables:
            changes = {
                "kind": read.kind,
                "line": read.line,
                "text": f"{taint.text}, from {read.text}",
                "suggestion": read.suggestion,
            }
            return taint.model_copy(update=changes)
    return taint


def _of_suspect(first: RankRead, grade: Grade, values: dict[int, str]) -> Taint:
    """A suspect with what it gives on each rank, where that is known."""
    groups = group_by(values)
    shown = [values[ranks[0]] for ranks in groups]
    row = [value_item("read", value, line=first.line) if value else None for value in shown]
    return Taint(
        what=first.what,
        kind=first.kind,
        grade=grade,
        text=first.text,
        variable=first.variable,
        where=first.where,
        line=first.line,
        groups=sides(groups, row),
        suggestion=_SUGGESTIONS[first.kind],
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
        where=f"{slot.phase}, {slot.frame}" if slot.phase else slot.frame,
        line=row.lines[0] if row.lines else None,
        groups=sides(groups, row),
        suggestion=_SUGGESTIONS[kind],
    )


def _is_of_python(guard: Item) -> bool:
    """True for a guard on a Python value."""
    return guard.kind == ItemKind.GUARD and "keys" not in guard.notes


def _by_rank(groups: Groups, values: Sequence[str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for ranks, value in zip(groups, values, strict=True):
        if value:
            found |= dict.fromkeys(ranks, value)
    return found


def _differs_in_constants(row: Row) -> bool:
    """True for nodes that are one op on the same operands, with other numbers or texts."""
    return row.is_full and len(row.distinct(_skeleton)) == 1


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


def _listed(calls: Sequence[str]) -> str:
    different = list(dict.fromkeys(calls))
    more = f" and {len(different) - 2} more" if len(different) > 2 else ""
    return " / ".join(different[:2]) + more


def _surer(old: RankRead | None, new: RankRead) -> RankRead:
    is_surer = new.is_sure and not new.receiver
    return new if old is None or is_surer else old


def value_text(item: Item) -> str:
    """What one group of ranks has: the value a guard compares with, the call, or what was read."""
    if item.kind == ItemKind.NODE:
        return _call(item)
    return item.notes.get("value") or item.says
