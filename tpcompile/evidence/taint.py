"""`RankDigest`s of all ranks -> every guard, graph constant and read that depends on the rank, agreeing or not.

Values decide before names do: what differs across ranks is certain, what is equal on ranks that differ cannot be
the rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tpcompile.evidence.align import Slot, align
from tpcompile.evidence.domain import Allowed, Domain, Fetch, group_by
from tpcompile.evidence.layerspec import Groups, Row
from tpcompile.evidence.records import (
    Check,
    Grade,
    Item,
    ItemKind,
    Layer,
    RankDigest,
    RankGroup,
    RankRead,
    Status,
    Taint,
    TaintKind,
    UserLine,
    value_item,
)
from tpcompile.evidence.rows import rows_of
from tpcompile.evidence.text.ranks import ranks_text

UNTAINTED = "rank-dependent guards and constants"

RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "PMI_RANK",
    "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "HOSTNAME",
})  # fmt: skip
"""Variables that differ by nature: listed when traced code reads them, whatever they hold today."""

_NUMBER = re.compile(r"(?<![\w.%#\[])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.\]])")
_STRING = re.compile(r"'[^']*'")
_PLACES = {
    "rank": TaintKind.RANK, "coordinate": TaintKind.GROUP_RANK, "local rank": TaintKind.LOCAL_RANK,
    "device index": TaintKind.DEVICE_INDEX,
}  # fmt: skip
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
    for name in sorted({d.domain for d in digests}):
        ranks = sorted((d for d in digests if d.domain == name), key=lambda d: d.rank)
        found += _Tainted(Domain(name, ranks, fetch)).taints()
    order = list(Grade)
    reasoned = [taint.model_copy(update={"reason": _reason(taint, allowed)}) for taint in _once(found)]
    return tuple(sorted(reasoned, key=lambda t: (order.index(t.grade), str(t.line), t.text)))


def _once(taints: Sequence[Taint]) -> list[Taint]:
    """Each taint of a line once, the first compile's: a recompile bakes the same constant into another node."""
    keyed = {(t.what, t.kind, t.line and str(t.line), _subject(t)): t for t in reversed(taints)}
    return list(keyed.values())[::-1]


def _subject(taint: Taint) -> str:
    """What tells taints of one line apart; a constant is told by its line, where it has one."""
    return "" if taint.what == "constant" and taint.line is not None else taint.text


def _reason(taint: Taint, allowed: Allowed) -> str:
    layers = {"taint", {"guard": "guards", "constant": "graph", "read": "taint"}[taint.what]}
    code = taint.line.code if taint.line else ""
    text = f"{taint.text} at {taint.line} {code}"
    reasons = [reason for layer, contains, reason in allowed if layer in layers and contains in text]
    return reasons[0] if reasons else ""


class _Tainted:
    """Ranks that must agree, and what of them depends on the rank."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.ranks = domain.ranks
        self.places: dict[str, dict[int, int]] = {
            "rank": {d.rank: d.rank for d in self.ranks},
            "coordinate": {d.rank: d.coordinate for d in self.ranks},
        }
        for name in ("local rank", "device index"):
            known = {d.rank: d.places[name] for d in self.ranks if name in d.places}
            self.places[name] = known if len(known) == len(self.ranks) else {}

    def taints(self) -> list[Taint]:
        """Constants with the read that made them, guards with the read that asked for them, then what is left."""
        slots = align(self.ranks)
        reads = list(self.reads())
        constants = [self.explained(taint, reads) for slot in slots for taint in self.constants(slot)]
        guards = [self.explained(taint, reads) for slot in slots for taint in self.guards(slot)]
        told = {(taint.kind, str(taint.line)) for taint in (*constants, *guards)}
        left = [read for read in reads if (read.kind, str(read.line)) not in told]
        seen = {(guard.text, guard.line) for guard in guards}
        named = [taint for taint in self.named() if (taint.text, taint.line) not in seen]
        return [*constants, *guards, *left, *named]

    def guards(self, slot: Slot) -> Iterator[Taint]:
        """Guards about one value that say different things."""
        groups = self.groups(slot, Layer.GUARDS)
        is_same_program = len(self.groups(slot, Layer.GRAPH)) == 1
        for row in self.rows(slot, Layer.GUARDS, groups):
            items = [item for item in row if item is not None]
            if not _is_of_python(items[0]):
                continue  # tensors and the state of the process have findings of their own
            if len(items) < len(row) and not is_same_program:
                continue  # another program has other guards: a consequence, not a cause
            variable = items[0].notes.get("variable", "")
            values = [item.notes.get("value", "") if item else "" for item in row]
            kind = TaintKind.ENVIRONMENT if variable else self.kind_of(_by_rank(groups, values))
            yield _taint("guard", kind, Grade.CERTAIN, items[0].about, row, groups, where=_where(slot))

    def constants(self, slot: Slot) -> Iterator[Taint]:
        """Nodes that are equal but for numbers, or texts, in their arguments."""
        groups = self.groups(slot, Layer.GRAPH)
        rows = self.rows(slot, Layer.GRAPH, groups)
        if any(not _differs_in_constants(row) for row in rows):
            return  # other ops: another program, which the graph layer reports
        for row in rows:
            calls = [_call(item) for item in row if item]
            columns = list(zip(*(_NUMBER.findall(call) for call in calls), strict=False))
            kinds = [self.kind_of(_by_rank(groups, column)) for column in columns if len(set(column)) > 1]
            known = [kind for kind in kinds if kind != TaintKind.DIFFERS]
            kind = known[0] if known else TaintKind.DIFFERS
            yield _taint("constant", kind, Grade.CERTAIN, _listed(calls), row, groups, where=_where(slot))

    def rows(self, slot: Slot, layer: Layer, groups: Groups) -> tuple[Row, ...]:
        """What differs in one layer of one compile; nothing when the hashes agree."""
        if len(groups) < 2:
            return ()
        items = tuple(self.domain.items(ranks[0], slot.compiles[ranks[0]].index, layer) for ranks in groups)
        return rows_of(items, is_ordered=layer == Layer.GRAPH)

    def groups(self, slot: Slot, layer: Layer) -> Groups:
        shas = {rank: c.sha(layer) for rank, c in slot.compiles.items()}
        return group_by({rank: sha for rank, sha in shas.items() if sha is not None})

    def kind_of(self, values: dict[int, str]) -> TaintKind:
        """Which number of the ranks these values are, on every rank and with at least two of them distinct."""
        if len(set(values.values())) < 2:
            return TaintKind.DIFFERS
        for name, numbers in self.places.items():
            if numbers and all(value == str(numbers[rank]) for rank, value in values.items()):
                return _PLACES[name]
        return TaintKind.DIFFERS

    def explained(self, taint: Taint, reads: Sequence[Taint]) -> Taint:
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

    def reads(self) -> Iterator[Taint]:
        """Reads in traced code, by line and text over all ranks and compiles."""
        for seen in self.suspects("read").values():
            first = next(iter(seen.values()))
            differs = len({read.value for read in seen.values()}) > 1
            is_setting = first.kind == TaintKind.ENVIRONMENT and first.variable not in RANK_VARIABLES
            if is_setting and not differs:
                continue  # equal everywhere: an ordinary setting
            # torch says what a rank read gives; of a host or variable only a difference shows that it matters.
            matters = differs or first.kind not in (TaintKind.ENVIRONMENT, TaintKind.HOSTNAME)
            is_sure = any(read.is_sure for read in seen.values()) and not first.receiver
            grade = Grade.CERTAIN if is_sure and matters else Grade.LIKELY
            yield self.of_suspects("read", seen, grade)

    def named(self) -> Iterator[Taint]:
        """Guards on a value with a rank's name that say the same on every rank."""
        for seen in self.suspects("guard").values():
            first = next(iter(seen.values()))
            if len(seen) == len(self.ranks) and self.could_be_rank(first.value):
                yield self.of_suspects("guard", seen, Grade.POSSIBLE)

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

    def of_suspects(self, what: str, seen: dict[int, RankRead], grade: Grade) -> Taint:
        first = next(iter(seen.values()))
        values = {rank: self.value(rank, suspect) if what == "read" else "" for rank, suspect in seen.items()}
        groups = group_by(values)
        shown = [values[ranks[0]] for ranks in groups]
        row = tuple(value_item("read", value, line=first.line) if value else None for value in shown)
        taint = _taint(what, first.kind, grade, first.text, row, groups, where=first.where, line=first.line)
        return taint.model_copy(update={"variable": first.variable})

    def value(self, rank: int, suspect: RankRead) -> str:
        """What the read gives on a rank, by its kind where the rank did not say."""
        names = [name for name, kind in _PLACES.items() if kind == suspect.kind]
        known = self.places.get(names[0], {}).get(rank) if names else None
        return suspect.value or ("" if known is None else str(known))


def _is_of_python(guard: Item) -> bool:
    """True for a guard on a Python value."""
    return guard.kind == ItemKind.GUARD and "keys" not in guard.notes


def _by_rank(groups: Groups, values: Sequence[str]) -> dict[int, str]:
    return {rank: value for ranks, value in zip(groups, values, strict=True) for rank in ranks if value}


def _differs_in_constants(row: Row) -> bool:
    """True for nodes that are one op on the same operands, with other numbers or texts."""
    if None in row:
        return False
    return len({_skeleton(item) for item in row if item}) == 1


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


def _taint(
    what: str,
    kind: TaintKind,
    grade: Grade,
    text: str,
    row: Row,
    groups: Groups,
    *,
    where: str,
    line: UserLine | None = None,
) -> Taint:
    lines = [item.line for item in row if item is not None and item.line is not None]
    fields = {
        "what": what,
        "kind": kind,
        "grade": grade,
        "text": text,
        "where": where,
        "suggestion": _SUGGESTIONS[kind],
        "groups": [RankGroup(ranks=ranks, item=item) for ranks, item in zip(groups, row, strict=True)],
        "line": line or (lines[0] if lines else None),
    }
    return Taint.model_validate(fields)


def _where(slot: Slot) -> str:
    return f"{slot.phase}, {slot.frame}" if slot.phase else slot.frame


def taint_check(mode: str, digests: Sequence[RankDigest], taints: Sequence[Taint], *, fails: bool) -> Check:
    """One check over the taints of a mode: listed, or red for the certain ones nobody allowed when `fails`."""
    mine = [taint for taint in taints if not mode or taint.where.startswith(f"{mode}/")]
    open_ = [taint for taint in mine if not taint.reason]
    red = [taint for taint in open_ if taint.grade == Grade.CERTAIN] if fails else []
    shown = red or open_ or mine
    rest = [taint for taint in mine if taint not in shown]
    is_seen = any(d.compiles for d in digests)
    observed = "none" if is_seen else "not observed"
    unread = "" if any(d.is_code_seen for d in digests) else "; traced code was not looked at"
    ranks = {rank for group in red[0].groups for rank in group.ranks} if red else set[int]()
    return Check(
        name=UNTAINTED,
        mode=mode,
        status=_status(red, mine, is_seen=is_seen),
        expected="none, or allowed with a reason",
        observed=(_counted(mine) if mine else observed) + unread,
        details=tuple(taint_text(taint) for taint in (*shown, *rest)),
        line=shown[0].line if shown else None,
        ranks=tuple(sorted(ranks)),
    )


def _status(red: Sequence[Taint], mine: Sequence[Taint], *, is_seen: bool) -> Status:
    if red:
        return Status.FAIL
    if mine:
        return Status.INFO
    return Status.PASS if is_seen else Status.SKIPPED


def _counted(taints: Sequence[Taint]) -> str:
    open_ = [taint for taint in taints if not taint.reason]
    counts = {grade.value: sum(taint.grade == grade for taint in open_) for grade in Grade}
    counts["allowed"] = len(taints) - len(open_)
    said = [f"{count} {name}" for name, count in counts.items() if count]
    first = open_[0] if open_ else taints[0]
    return f"{', '.join(said)}; first: {first.text}"


def taint_text(taint: Taint) -> str:
    """One line of a report: grade, what, kind, where, values, what to do or why it is allowed."""
    values = [f"rank {ranks_text(g.ranks)}: {value_text(g.item)}" for g in taint.groups if g.item is not None]
    why = "; ".join([taint.kind.value, *values])
    end = f"allowed: {taint.reason}" if taint.reason else taint.suggestion
    at = f" at {taint.line}" if taint.line else ""
    return f"{taint.grade} {taint.what} {taint.text}{at} ({why}): {end}"


def value_text(item: Item) -> str:
    """What one group of ranks has: the value a guard compares with, the call, or what was read."""
    if item.kind == ItemKind.NODE:
        return _call(item)
    return item.notes.get("value") or item.says
