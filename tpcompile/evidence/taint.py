"""`RankDigest`s of all ranks -> every guard, graph constant and read that depends on the rank, agreeing or not.

Values decide before names do: what differs across ranks is certain, what is equal on ranks that differ cannot be
the rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from tpcompile.evidence.align import Slot, align
from tpcompile.evidence.compare import Allowed
from tpcompile.evidence.digest import SEPARATOR
from tpcompile.evidence.ranktext import ranks_text
from tpcompile.evidence.records import (
    Check,
    Grade,
    Item,
    Layer,
    RankDigest,
    RankGroup,
    RankRead,
    Status,
    Taint,
    TaintKind,
    UserLine,
)
from tpcompile.evidence.rows import Fetch, differing_items

UNTAINTED = "no rank-dependent guard or constant"

RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "PMI_RANK",
    "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "HOSTNAME",
})  # fmt: skip
"""Variables that differ by nature: listed when traced code reads them, whatever they hold today."""

_EQUALS = re.compile(r"(?:==|is) (?P<value>\S.*)$")
_NUMBER = re.compile(r"(?<![\w.%#\[])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.\]])")
_VARIABLE = re.compile(r"\.environ(?:\._data)?\[b?'(?P<name>[^']+)'\]")
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
    for domain in sorted({d.domain for d in digests}):
        ranks = sorted((d for d in digests if d.domain == domain), key=lambda d: d.rank)
        found += _Domain(ranks, fetch).taints()
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
    return next((reason for layer, contains, reason in allowed if layer in layers and contains in text), "")


class _Domain:
    """Ranks that must agree."""

    def __init__(self, ranks: Sequence[RankDigest], fetch: Fetch) -> None:
        self.ranks, self.fetch = ranks, fetch
        self.places: dict[str, dict[int, int]] = {
            "rank": {d.rank: d.rank for d in ranks},
            "coordinate": {d.rank: d.coordinate for d in ranks},
        }
        for name in ("local rank", "device index"):
            known = {d.rank: d.places[name] for d in ranks if name in d.places}
            self.places[name] = known if len(known) == len(ranks) else {}

    def taints(self) -> list[Taint]:
        """Constants with the read that made them, guards with the read that asked for them, then what is left."""
        slots = align(self.ranks)
        reads = list(self.reads())
        constants = [self.explained(t, reads) for slot in slots for t in self.constants(slot)]
        guards = [self.explained(t, reads) for slot in slots for t in self.guards(slot)]
        named = [t for t in self.named() if t.line not in [g.line for g in guards if g.text == t.text]]
        told = {(t.kind, str(t.line)) for t in (*constants, *guards)}
        return [*constants, *guards, *(r for r in reads if (r.kind, str(r.line)) not in told), *named]

    def guards(self, slot: Slot) -> Iterator[Taint]:
        """Guards about one value that say different things."""
        for row, groups in self.rows(slot, Layer.GUARDS):
            items = [item for item in row if item is not None]
            is_same_program = len(self.groups(slot, Layer.GRAPH)) == 1
            if len(items) < len(row) and not is_same_program:
                continue  # another program has other guards: a consequence, not a cause
            values = self.values(row, groups, lambda item: _equal_to(item.text))
            variable = _VARIABLE.search(items[0].text)
            kind = TaintKind.ENVIRONMENT if variable else self.kind_of(values)
            about = items[0].text.partition(SEPARATOR)[0]
            yield _taint("guard", kind, Grade.CERTAIN, about, row, groups, where=_where(slot))

    def constants(self, slot: Slot) -> Iterator[Taint]:
        """Nodes that are equal but for numbers, or texts, in their arguments."""
        rows = list(self.rows(slot, Layer.GRAPH))
        if any(None in row or len({_skeleton(i.text) for i in row if i}) > 1 for row, _ in rows):
            return  # other ops: another program, which the graph layer reports
        for row, groups in rows:
            columns = zip(*(_NUMBER.findall(_call(item.text)) for item in row if item), strict=False)
            differing = [list(column) for column in columns if len(set(column)) > 1]
            kinds = [self.kind_of({r: n for g, n in zip(groups, c, strict=True) for r in g}) for c in differing]
            kind = next((k for k in kinds if k != TaintKind.DIFFERS), TaintKind.DIFFERS)
            calls = list(dict.fromkeys(_call(item.text) for item in row if item))
            text = " against ".join(calls[:2]) + (f" and {len(calls) - 2} more" if len(calls) > 2 else "")
            yield _taint("constant", kind, Grade.CERTAIN, text, row, groups, where=_where(slot))

    def rows(self, slot: Slot, layer: Layer) -> Iterator[tuple[tuple[Item | None, ...], list[tuple[int, ...]]]]:
        """What differs in one layer of one compile, with the ranks of each column; nothing when the hashes agree."""
        groups = self.groups(slot, layer)
        if len(groups) < 2:
            return
        items = [tuple(self.fetch(ranks[0], slot.compiles[ranks[0]].index, layer, "")) for ranks in groups]
        for row in differing_items(items, ordered=layer == Layer.GRAPH):
            yield row, groups

    def groups(self, slot: Slot, layer: Layer) -> list[tuple[int, ...]]:
        by_sha: dict[str, list[int]] = {}
        for rank, compile_ in sorted(slot.compiles.items()):
            if (sha := compile_.sha(layer)) is not None:
                by_sha.setdefault(sha, []).append(rank)
        return [tuple(ranks) for ranks in by_sha.values()]

    def values(
        self, row: Sequence[Item | None], groups: Sequence[tuple[int, ...]], value: Callable[[Item], str]
    ) -> dict[int, str]:
        return {rank: value(item) for item, ranks in zip(row, groups, strict=True) if item for rank in ranks}

    def kind_of(self, values: dict[int, str]) -> TaintKind:
        """Which number of the ranks these values are, on every rank and with at least two of them distinct."""
        if len(set(values.values())) < 2:
            return TaintKind.DIFFERS
        for name, numbers in self.places.items():
            if numbers and all(values.get(rank) == str(numbers[rank]) for rank in values):
                return _PLACES[name]
        return TaintKind.DIFFERS

    def explained(self, taint: Taint, reads: Sequence[Taint]) -> Taint:
        """The taint with kind, and line where it has none, of the read that caused it."""
        variable = _VARIABLE.search(taint.groups[0].item.text) if taint.groups and taint.groups[0].item else None
        for read in reads:
            same_line = taint.line is not None and str(read.line) == str(taint.line)
            same_variable = variable is not None and f"'{variable['name']}'" in read.text
            if same_line or same_variable:
                text = f"{taint.text}, from {read.text}"
                return taint.model_copy(update={
                    "kind": read.kind, "line": read.line, "text": text, "suggestion": read.suggestion,
                })  # fmt: skip
        return taint

    def reads(self) -> Iterator[Taint]:
        """Reads in traced code, by line and text over all ranks and compiles."""
        for seen in self.suspects("read").values():
            first = next(iter(seen.values()))
            values = {rank: read.value for rank, read in seen.items()}
            differs = len(set(values.values())) > 1
            if first.kind == TaintKind.ENVIRONMENT and not differs and first.variable not in RANK_VARIABLES:
                continue  # equal everywhere: an ordinary setting
            is_sure = any(read.is_sure for read in seen.values())
            # torch says what a rank read gives; of a host or variable only a difference shows that it matters.
            differs = differs or first.kind not in (TaintKind.ENVIRONMENT, TaintKind.HOSTNAME)
            grade = Grade.CERTAIN if is_sure and differs and not first.receiver else Grade.LIKELY
            yield self.of_suspects("read", seen, grade)

    def named(self) -> Iterator[Taint]:
        """Guards on a value with a rank's name that say the same on every rank."""
        for seen in self.suspects("guard").values():
            value = _equal_to(next(iter(seen.values())).text)
            if len(seen) == len(self.ranks) and self.could_be_rank(value):
                yield self.of_suspects("guard", seen, Grade.POSSIBLE)

    def could_be_rank(self, value: str) -> bool:
        """False for a number no rank has (a LoRA rank of 16); a value that is no number says nothing."""
        return not value.lstrip("-").isdigit() or 0 <= int(value) < max(2, len(self.ranks), self.ranks[-1].rank + 1)

    def suspects(self, what: str) -> dict[tuple[str, str], dict[int, RankRead]]:
        found: dict[tuple[str, str], dict[int, RankRead]] = {}
        for digest in self.ranks:
            for suspect in digest.suspects:
                if suspect.what == what:
                    seen = found.setdefault((suspect.text, str(suspect.line)), {})
                    seen[digest.rank] = _surer(seen.get(digest.rank), suspect)
        return found

    def of_suspects(self, what: str, seen: dict[int, RankRead], grade: Grade) -> Taint:
        first = next(iter(seen.values()))
        by_value: dict[str, list[int]] = {}
        for rank, suspect in seen.items():
            by_value.setdefault(self.value(rank, suspect), []).append(rank)
        groups = [tuple(ranks) for ranks in by_value.values()]
        row = [Item(text=value, line=first.line) if value else None for value in by_value]
        text = first.text.partition(SEPARATOR)[2] or first.text
        return _taint(what, first.kind, grade, text, row, groups, where=first.where, line=first.line)

    def value(self, rank: int, suspect: RankRead) -> str:
        """What the read gives on a rank, by its kind where the rank did not say."""
        names = [name for name, kind in _PLACES.items() if kind == suspect.kind]
        known = self.places.get(names[0], {}).get(rank) if names and suspect.what == "read" else None
        return suspect.value or ("" if known is None else str(known))


def _surer(old: RankRead | None, new: RankRead) -> RankRead:
    return new if old is None or (new.is_sure and not new.receiver) else old


def _taint(
    what: str,
    kind: TaintKind,
    grade: Grade,
    text: str,
    row: Sequence[Item | None],
    groups: Sequence[tuple[int, ...]],
    *,
    where: str,
    line: UserLine | None = None,
) -> Taint:
    lines = [item.line for item in row if item is not None and item.line is not None]
    return Taint.model_validate({
        "what": what, "kind": kind, "grade": grade, "text": text, "where": where, "suggestion": _SUGGESTIONS[kind],
        "groups": [RankGroup(ranks=r, item=item) for r, item in zip(groups, row, strict=True)],
        "line": line or (lines[0] if lines else None),
    })  # fmt: skip


def _where(slot: Slot) -> str:
    return f"{slot.phase}, {slot.frame}" if slot.phase else slot.frame


def _equal_to(text: str) -> str:
    """What a guard compares with: `0` of `L['self'].rank == 0`, else empty."""
    match = _EQUALS.search(text)
    return match["value"] if match else ""


def _call(text: str) -> str:
    """`mul(%1, 3)` of a graph item."""
    return text.partition(SEPARATOR)[2].removeprefix("call ").partition(" -> ")[0]


def _skeleton(text: str) -> str:
    """A graph item without the numbers and texts an argument may hold."""
    return re.sub(r"'[^']*'", "'#'", _NUMBER.sub("#", text))


def taint_check(mode: str, digests: Sequence[RankDigest], taints: Sequence[Taint], *, fails: bool) -> Check:
    """One check over the taints of a mode: listed, or red for the certain ones nobody allowed when `fails`."""
    mine = [t for t in taints if not mode or t.where.startswith(f"{mode}/")]
    open_ = [t for t in mine if not t.reason]
    red = [t for t in open_ if t.grade == Grade.CERTAIN] if fails else []
    shown = red or open_ or mine
    is_seen = any(d.compiles for d in digests)
    unread = "" if any(d.is_code_seen for d in digests) else "; traced code was not looked at"
    status = Status.FAIL if red else Status.INFO if mine else Status.PASS if is_seen else Status.SKIPPED
    return Check(
        name=UNTAINTED,
        mode=mode,
        status=status,
        expected="none, or allowed with a reason",
        observed=(_counted(mine) if mine else "none" if is_seen else "not observed") + unread,
        details=tuple(taint_text(t) for t in (*shown, *(t for t in mine if t not in shown))),
        line=shown[0].line if shown else None,
        ranks=tuple(sorted({r for g in red[0].groups for r in g.ranks})) if red else (),
    )


def _counted(taints: Sequence[Taint]) -> str:
    allowed = sum(bool(t.reason) for t in taints)
    counts = [(sum(t.grade == grade and not t.reason for t in taints), grade.value) for grade in Grade]
    said = [f"{count} {name}" for count, name in (*counts, (allowed, "allowed")) if count]
    first = next((t for t in taints if not t.reason), taints[0])
    return f"{', '.join(said)}; first: {first.text}"


def taint_text(taint: Taint) -> str:
    """One line of a report: grade, what, kind, where, values, what to do or why it is allowed."""
    values = [(g.ranks, value_text(g.item)) for g in taint.groups if g.item is not None]
    shown = "; ".join(f"rank {ranks_text(ranks)}: {says}" for ranks, says in values)
    end = f"allowed: {taint.reason}" if taint.reason else taint.suggestion
    at = f" at {taint.line}" if taint.line else ""
    return f"{taint.grade} {taint.what} {taint.text}{at} ({taint.kind}{'; ' + shown if shown else ''}): {end}"


def value_text(item: Item) -> str:
    """What one group of ranks has: the value a guard compares with, the call, or what was read."""
    about, _, says = item.text.partition(SEPARATOR)
    return _equal_to(says) or (says.removeprefix("call ").partition(" -> ")[0] if says else about)
