"""Digests of all ranks, and their facts where hashes differ -> `Verdict`: checks by group, differences by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpcompile.evidence.comparison.compare import Allowed
from tpcompile.evidence.groups.by_rank import ByRank, entry
from tpcompile.evidence.iterables import differ, grouped
from tpcompile.evidence.judgement.equal_ranks import equal_groups
from tpcompile.evidence.records import Check, Divergence, DivergenceClass, Layer, Status, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks, ranks_text
from tpcompile.preflight.conclusion import (
    MAX_LISTED,
    MAX_NAMED,
    Groups,
    Kind,
    conclude,
    difference,
    group_check,
    reported,
    sides_text,
)
from tpcompile.preflight.fact_exchange import Details
from tpcompile.preflight.facts import (
    BACKENDS,
    CHANGES,
    CONFIG,
    DEVICE,
    DTYPES,
    ENV,
    SHARDS,
    TOPOLOGY,
    UNDECLARED,
    VERSIONS,
    WEIGHTS,
    RankFacts,
    SetupDigest,
)
from tpcompile.preflight.locate import located
from tpcompile.preflight.weights import misfit, shard_text
from tpcompile.ranks.exchange import Fetch

_BACKEND = "Name the backend instead of `auto`, which each rank resolves for itself."
_MESH = "Build the mesh from the same ranks in one order, on all ranks."
_ENVIRONMENT = Kind(Layer.ENVIRONMENT, Cause.ENVIRONMENT)
KINDS: dict[str, Kind] = {
    TOPOLOGY: Kind(Layer.ENVIRONMENT, Cause.GROUP, _MESH, DivergenceClass.COLLECTIVES),
    VERSIONS: _ENVIRONMENT,
    DEVICE: _ENVIRONMENT,
    ENV: _ENVIRONMENT,
    CONFIG: _ENVIRONMENT,
    BACKENDS: Kind(Layer.ENVIRONMENT, Cause.ENVIRONMENT, _BACKEND),
    DTYPES: Kind(Layer.ENVIRONMENT, Cause.DTYPE, missing="missing"),
    CHANGES: Kind(Layer.INPUTS, Cause.WEIGHTS, "", missing="unchanged"),
    WEIGHTS: Kind(Layer.INPUTS, Cause.WEIGHTS, missing="missing"),
    SHARDS: Kind(Layer.INPUTS, Cause.WEIGHTS, "", missing="missing"),
}
"""Group of facts -> how its differences are reported; causes before their effects."""


@dataclass(frozen=True)
class _Found:
    key: str
    groups: Groups
    note: str = ""
    """A remark that ends the title."""


@dataclass
class Judge:
    """Makes one verdict. `fetch` asks a rank for facts, `title` is the verdict's."""

    digests: Sequence[SetupDigest]
    absent: Mapping[int, str]
    fetch: Fetch
    timeout_s: float
    title: str
    allowed: Allowed = ()
    step: int | None = None

    def __post_init__(self) -> None:
        self._by_rank = ByRank({digest.rank: digest for digest in self.digests})
        self._shas = self._by_rank.map(lambda digest: digest.shas)
        self._domains = grouped(self._by_rank, lambda rank: self._by_rank[rank].domain)
        self._details: dict[str, Details[RankFacts]] = {}
        for group in set[str]().union(*self._shas.values()):
            shas = ByRank({rank: own.get(group, "") for rank, own in self._shas.items()})
            self._details[group] = Details(self.fetch, {"group": group}, shas, RankFacts)

    def verdict(self) -> Verdict:
        """All checks of all groups."""
        checks = [reported(len(self.digests), self.absent, timeout_s=self.timeout_s), *self._answered()]
        divergences: list[Divergence] = []
        for group in KINDS:
            if group in self._details:
                check, found = self._group(group)
                checks.append(check)
                divergences += found
        checks += [*self._undeclared(), *self._changed_everywhere(), *self._own()]
        return conclude(
            checks,
            divergences,
            world_size=len(self.digests) + len(self.absent),
            title=self.title,
            domains=equal_groups(self._domains, divergences),
        )

    def _scopes(self, group: str) -> dict[str, list[int]]:
        """Domain -> ranks. Topology has one domain, the job: ranks that differ in it do not agree on domains."""
        if group not in self._details:
            return {}
        return {"": list(self._by_rank)} if group == TOPOLOGY else dict(sorted(self._domains.items()))

    def _known(self, group: str, *, num_ranks: int = 1) -> list[ByRank[RankFacts]]:
        """Facts of the ranks of each domain that has at least `num_ranks` ranks."""
        scopes = self._scopes(group).values()
        return [self._details[group].of(ranks) for ranks in scopes if len(ranks) >= num_ranks]

    # Groups of facts that are judged.

    def _group(self, group: str) -> tuple[Check, list[Divergence]]:
        found: list[Divergence] = []
        names: list[str] = []
        num_keys = 0
        for domain, ranks in self._scopes(group).items():
            known = self._details[group].of(ranks)
            if len(known) < len(ranks):
                found.append(self._silent(group, domain, ranks, known))
                continue
            num_keys = max(num_keys, *(_size(facts, group) for facts in known.values()))
            rows = _misfits(known) if group == SHARDS else _rows(known, group)
            names += [row.key for row in rows]
            found += self._named(group, domain, rows)
        return group_check(group, found, names, num_keys), found

    def _silent(self, group: str, domain: str, ranks: Sequence[int], known: Mapping[int, RankFacts]) -> Divergence:
        silent = sorted(set(ranks).difference(known))
        shas = self._details[group].shas
        texts = {rank: f"sha256:{shas[rank]}" if shas[rank] else None for rank in ranks}
        note = f"{named_ranks(silent)} did not send the details"
        return difference(group, ByRank(texts).sides(), kind=KINDS[group], domain=domain, note=note)

    def _named(self, group: str, domain: str, rows: Sequence[_Found]) -> list[Divergence]:
        """The first rows as divergences; those that are not in the allow-list come first."""
        named = sorted(rows, key=lambda row: not self._divergence(group, domain, row).is_red)[:MAX_NAMED]
        found = []
        for row in named:
            at = ""
            if group == WEIGHTS:
                at = located(self.fetch, row.groups, row.key.removeprefix("weight "))
            found.append(self._divergence(group, domain, row, at=at))
        return found

    def _divergence(self, group: str, domain: str, row: _Found, *, at: str = "") -> Divergence:
        return difference(
            row.key,
            row.groups,
            kind=KINDS[group],
            domain=domain,
            allowed=self.allowed,
            note=row.note,
            found=at,
            step=self.step,
        )

    # Checks that are not by group.

    def _answered(self) -> list[Check]:
        failed = self._by_rank.map(lambda digest: digest.unresolved).where(bool)
        details = [f"rank {rank}: {name} {error}" for rank, them in failed.items() for name, error in them.items()]
        if not failed:
            return []
        return [
            Check(
                name="every resolver answered",
                status=Status.FAIL,
                expected="the resolved backend",
                observed="; ".join(details),
                details=tuple(details),
                ranks=tuple(failed),
            )
        ]

    def _undeclared(self) -> list[Check]:
        rows: list[_Found] = []
        sizes = [0]
        for known in self._known(UNDECLARED, num_ranks=2):
            sizes_of_ranks = known.map(lambda facts: _size(facts, UNDECLARED))
            sizes += sizes_of_ranks.values()
            rows += _rows(known, UNDECLARED)
        num = max(sizes)
        if not num:
            return []
        expected = "not judged: replicated or sharded is not known"
        if not rows:
            return [_information("undeclared weights", expected, f"all {num} are bit-equal", ())]
        observed = f"{len(rows)} of {num} differ between ranks"
        details = []
        for row in rows[:MAX_LISTED]:
            sides = [ranks_text(ranks) for ranks, _ in row.groups]
            details.append(f"{row.key}: {' | '.join(sides)}")
        details.append("name the sharded tensors with sharded=[...]; all other tensors are then compared as replicated")
        return [_information("undeclared weights", expected, observed, details)]

    def _changed_everywhere(self) -> list[Check]:
        """Weights that changed on all ranks of a group are listed, not red: new weights may have been loaded."""
        common: set[str] = set()
        for known in self._known(CHANGES):
            changed = known.map(lambda own: set(own.of(CHANGES)))
            common |= set[str]().union(*changed.values()).intersection(*changed.values())
        if not common:
            return []
        observed = f"{len(common)} changed on all ranks of a group"
        shown = sorted(common)[:MAX_LISTED]
        return [_information("weights changed on all ranks", "none, with frozen weights", observed, shown)]

    def _own(self) -> list[Check]:
        rows = _differing(self._by_rank.map(lambda digest: digest.own))
        details = [f"{row.key}: {sides_text(row.groups)}" for row in rows]
        names = ", ".join(row.key for row in rows)
        return [_information("normalised", "differs by nature, not compared", names, details)] if rows else []


def _information(name: str, expected: str, observed: str, details: Sequence[str]) -> Check:
    return Check(name=name, status=Status.INFO, expected=expected, observed=observed, details=tuple(details))


def _rows(facts: ByRank[RankFacts], group: str) -> list[_Found]:
    """Keys that do not have one value on all ranks.

    Weights are left out that the dtype policy reports already: missing on some rank, or of a different dtype.
    """
    rows = _differing(facts.map(lambda own: own.of(group)))
    if group != WEIGHTS:
        return rows
    found = []
    for row in rows:
        values = [value for _, value in row.groups]
        dtypes = [value and value.partition("[")[0] for value in values]  # None where the weight is missing
        if None not in values and not differ(dtypes):
            found.append(row)
    return found


def _misfits(facts: ByRank[RankFacts]) -> list[_Found]:
    """Sharded tensors whose shards do not tile it, or that only some ranks hold as shards."""
    shards = facts.map(lambda own: own.shards)
    found = []
    for name in sorted(set[str]().union(*shards.values())):
        have = entry(shards, name)
        note = "sharded on some ranks only"
        if len(have) == len(shards):
            note = misfit(have) if len(have) > 1 else ""
        if note:
            groups = ByRank(dict.fromkeys(shards) | dict(have.map(shard_text))).sides()
            found.append(_Found(f"shard {name}", groups, note))
    return found


def _differing(values: ByRank[Mapping[str, str]]) -> list[_Found]:
    """Keys that do not have one value on all ranks."""
    keys = set[str]().union(*values.values())
    found = []
    for key in sorted(keys):
        of_key = ByRank({rank: own.get(key) for rank, own in values.items()})
        sides = of_key.sides()
        if len(sides) > 1:
            found.append(_Found(key, sides))
    return found


def _size(facts: RankFacts, group: str) -> int:
    return len(facts.shards) if group == SHARDS else len(facts.of(group))
