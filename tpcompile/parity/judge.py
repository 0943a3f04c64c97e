"""Digests of all ranks, and their facts where hashes differ -> `Verdict`: checks by group, differences by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpcompile.dist.exchange import Fetch
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.compare import Allowed
from tpcompile.evidence.records import Check, Divergence, DivergenceClass, Layer, Status, Verdict
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.parity.conclusion import MAX_LISTED, MAX_NAMED, conclude, group_check, reported
from tpcompile.parity.differences import Groups, Kind, difference, groups_of
from tpcompile.parity.exchange import Details
from tpcompile.parity.facts import (
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
    ParityDigest,
    RankFacts,
)
from tpcompile.parity.locate import located
from tpcompile.parity.shards import misfit, shard_text

_BACKEND = (
    "`auto` was resolved per rank, by what is installed and set there: name the backend instead of `auto`, or install "
    "the same packages."
)
_MESH = (
    "The ranks see different meshes and will build different groups: make the mesh from the same numbers everywhere."
)
_CHANGED = "With frozen weights nothing may write to them after loading: look for an in-place op or a late load there."
_SHAPES = "Every rank must take its own share of the same tensor: look at the split and at the checkpoint it came from."
_ENVIRONMENT = Kind(Layer.ENVIRONMENT, Cause.ENVIRONMENT, "")
KINDS: dict[str, Kind] = {
    TOPOLOGY: Kind(Layer.ENVIRONMENT, Cause.GROUP, _MESH, DivergenceClass.COLLECTIVES),
    VERSIONS: _ENVIRONMENT,
    DEVICE: _ENVIRONMENT,
    ENV: _ENVIRONMENT,
    CONFIG: _ENVIRONMENT,
    BACKENDS: Kind(Layer.ENVIRONMENT, Cause.ENVIRONMENT, _BACKEND),
    DTYPES: Kind(Layer.ENVIRONMENT, Cause.DTYPE, "", missing="not there"),
    CHANGES: Kind(Layer.INPUTS, Cause.WEIGHTS, _CHANGED, missing="unchanged"),
    WEIGHTS: Kind(Layer.INPUTS, Cause.WEIGHTS, "", missing="not there"),
    SHARDS: Kind(Layer.INPUTS, Cause.WEIGHTS, _SHAPES, missing="not there"),
}
"""Groups in the order they are asked for, cause before effect."""


@dataclass(frozen=True)
class _Found:
    """One key in which ranks of a scope differ."""

    key: str
    groups: Groups
    note: str = ""
    """What is wrong with it besides, at the end of the title."""


@dataclass
class Judge:
    """One judgement. `fetch` asks ranks for facts, `title` heads the verdict."""

    digests: Sequence[ParityDigest]
    absent: Mapping[int, str]
    fetch: Fetch
    timeout_s: float
    title: str
    allowed: Allowed = ()
    step: int | None = None

    def __post_init__(self) -> None:
        asked = set[str]().union(*(digest.shas for digest in self.digests))
        self._details = {group: self._details_of(group) for group in asked}

    def _details_of(self, group: str) -> Details[RankFacts]:
        shas = {digest.rank: digest.shas.get(group, "") for digest in self.digests}
        return Details(self.fetch, {"group": group}, shas, RankFacts.model_validate)

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
            domains=self._equal(),
        )

    def _scopes(self, group: str) -> dict[str, list[int]]:
        """Domain -> ranks. Topology is one for the whole job: ranks that differ in it also claim different domains."""
        if group not in self._details:
            return {}
        found: dict[str, list[int]] = {}
        for digest in sorted(self.digests, key=lambda digest: digest.domain):
            found.setdefault("" if group == TOPOLOGY else digest.domain, []).append(digest.rank)
        return found

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
            rows = self._misfits(known) if group == SHARDS else self._rows(known, group)
            names += [row.key for row in rows]
            found += self._named(group, domain, rows)
        return group_check(group, found, names, num_keys), found

    def _silent(self, group: str, domain: str, ranks: Sequence[int], known: Mapping[int, RankFacts]) -> Divergence:
        """Ranks that did not send what their hashes stand for."""
        silent = [rank for rank in ranks if rank not in known]
        shas = self._details[group].shas
        texts = {rank: f"sha256:{shas[rank]}" if shas[rank] else None for rank in ranks}
        note = f"rank {ranks_text(silent)} did not send the details"
        return difference(group, groups_of(texts), kind=KINDS[group], domain=domain, note=note)

    def _named(self, group: str, domain: str, rows: Sequence[_Found]) -> list[Divergence]:
        """The first rows as divergences, what nobody declared before a long list of what was."""
        judged = [(row, self._divergence(group, domain, row)) for row in rows]
        judged.sort(key=lambda pair: not pair[1].is_red)
        named = [row for row, _ in judged[:MAX_NAMED]]
        return [self._divergence(group, domain, row, at=self._located(group, row)) for row in named]

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

    def _rows(self, facts: Mapping[int, RankFacts], group: str) -> list[_Found]:
        """Keys that do not have one value on all ranks."""
        rows = _differing({rank: known.groups.get(group, {}) for rank, known in facts.items()})
        return [row for row in rows if group != WEIGHTS or _is_news(row.groups)]

    def _misfits(self, facts: Mapping[int, RankFacts]) -> list[_Found]:
        """Shards that do not add up to one tensor."""
        found = []
        for name in sorted(set[str]().union(*(known.shards for known in facts.values()))):
            have = {rank: known.shards[name] for rank, known in facts.items() if name in known.shards}
            texts = {rank: shard_text(shard) for rank, shard in have.items()}
            wrong = "sharded on some ranks only" if len(have) < len(facts) else ""
            if not wrong and len(have) > 1:
                wrong = misfit(have)
            if wrong:
                found.append(_Found(f"shard {name}", groups_of({rank: texts.get(rank) for rank in facts}), wrong))
        return found

    def _located(self, group: str, row: _Found) -> str:
        if group != WEIGHTS:
            return ""
        return located(self.fetch, row.groups, row.key.removeprefix("weight "))

    # Checks beside them.

    def _answered(self) -> list[Check]:
        failed = {digest.rank: digest.unresolved for digest in self.digests if digest.unresolved}
        if not failed:
            return []
        details = [f"rank {rank}: {name} {error}" for rank, them in failed.items() for name, error in them.items()]
        return [
            Check(
                name="every resolver answered",
                mode="",
                status=Status.FAIL,
                expected="the resolved backend",
                observed="; ".join(details),
                details=tuple(details),
                ranks=tuple(failed),
            )
        ]

    def _undeclared(self) -> list[Check]:
        rows: list[str] = []
        sizes = [0]
        for ranks in self._scopes(UNDECLARED).values():
            if len(ranks) > 1:
                known = self._details[UNDECLARED].of(ranks)
                sizes += [_size(facts, UNDECLARED) for facts in known.values()]
                rows += [f"{row.key}: {_who(row.groups)}" for row in self._rows(known, UNDECLARED)]
        num = max(sizes)
        if not num:
            return []
        observed, hint = f"all {num} are bit-equal", []
        if rows:
            observed = f"{len(rows)} of {num} differ between ranks"
            hint = ["say which tensors are shards with sharded=[...]; then the others are checked as replicated"]
        expected = "not judged: replicated or sharded is not known"
        return [_information("weights nobody declared", expected, observed, [*rows[:MAX_LISTED], *hint])]

    def _changed_everywhere(self) -> list[Check]:
        """What changed on all ranks of a group is no difference: a load of new weights looks like that."""
        common: set[str] = set()
        for ranks in self._scopes(CHANGES).values():
            known = self._details[CHANGES].of(ranks)
            changed = [set(facts.groups.get(CHANGES, {})) for facts in known.values()]
            common |= set.intersection(*changed) if changed else set()
        if not common:
            return []
        observed = f"{len(common)} changed on all ranks of a group"
        shown = sorted(common)[:MAX_LISTED]
        return [_information("weights changed on all ranks", "none, with frozen weights", observed, shown)]

    def _own(self) -> list[Check]:
        rows = _differing({digest.rank: digest.own for digest in self.digests})
        details = [f"{row.key}: {_values(row.groups)}" for row in rows]
        names = ", ".join(row.key for row in rows)
        return [_information("normalised", "differs by nature, not compared", names, details)] if rows else []

    def _equal(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Domain -> groups of ranks that hold the same, shards apart."""
        by_domain: dict[str, dict[int, str | None]] = {}
        for digest in self.digests:
            compared = {group: sha for group, sha in digest.shas.items() if group not in (SHARDS, UNDECLARED)}
            by_domain.setdefault(digest.domain, {})[digest.rank] = str(sorted(compared.items()))
        return {domain: tuple(ranks for ranks, _ in groups_of(values)) for domain, values in by_domain.items()}


def _information(name: str, expected: str, observed: str, details: Sequence[str]) -> Check:
    return Check(name=name, mode="", status=Status.INFO, expected=expected, observed=observed, details=tuple(details))


def _differing(values: Mapping[int, Mapping[str, str]]) -> list[_Found]:
    """Keys that do not have one value on all ranks."""
    found = []
    for key in sorted(set[str]().union(*values.values())):
        groups = groups_of({rank: mine.get(key) for rank, mine in values.items()})
        if len(groups) > 1:
            found.append(_Found(key, groups))
    return found


def _values(groups: Groups) -> str:
    return ", ".join(f"{value} on rank {ranks_text(ranks)}" for ranks, value in groups)


def _who(groups: Groups) -> str:
    return " | ".join(ranks_text(ranks) for ranks, _ in groups)


def _is_news(row: Groups) -> bool:
    """False when the dtype policy names it already: not there on all ranks, or of another dtype."""
    dtypes = {value.partition("[")[0] if value is not None else None for _, value in row}
    return len(dtypes) == 1 and None not in dtypes


def _size(facts: RankFacts, group: str) -> int:
    return len(facts.shards) if group == SHARDS else len(facts.groups.get(group, {}))
