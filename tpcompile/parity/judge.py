"""Digests of all ranks, and their facts where hashes differ -> `Verdict`: checks by group, differences by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpcompile.dist.exchange import Fetch
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.compare import Allowed
from tpcompile.evidence.records import Check, Divergence, DivergenceClass, Layer, Status, Verdict
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.parity.conclusion import MAX_LISTED, MAX_NAMED, conclude, group_check, reported
from tpcompile.parity.differences import Groups, Kind, difference, groups_of
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
from tpcompile.parity.locate import element_text, located
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
    _known: dict[tuple[str, str], RankFacts | None] = field(default_factory=dict)

    def verdict(self) -> Verdict:
        """All checks of all groups."""
        checks = [reported(len(self.digests), self.absent, timeout_s=self.timeout_s), *self._answered()]
        divergences: list[Divergence] = []
        for group in (g for g in KINDS if any(g in d.shas for d in self.digests)):
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

    def _answered(self) -> list[Check]:
        failed = {d.rank: d.unresolved for d in self.digests if d.unresolved}
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

    def _group(self, group: str) -> tuple[Check, list[Divergence]]:
        found: list[Divergence] = []
        names: list[str] = []
        num_keys = 0
        for domain, ranks in self._scopes(group):
            facts = {rank: self._facts(rank, group) for rank in ranks}
            silent = tuple(rank for rank, known in facts.items() if known is None)
            if silent:
                groups: Groups = groups_of({rank: f"sha256:{self._digest(rank).shas.get(group)}" for rank in ranks})
                note = f"rank {ranks_text(silent)} did not send the details"
                found.append(difference(group, groups, kind=KINDS[group], domain=domain, note=note))
                continue
            known = {rank: value for rank, value in facts.items() if value is not None}
            rows = self._misfits(known) if group == SHARDS else self._rows(known, group)
            num_keys = max(num_keys, *(_size(value, group) for value in known.values()))
            names += [key for key, _, _ in rows]
            kind, allowed = KINDS[group], self.allowed
            judged = [
                difference(key, row, kind=kind, domain=domain, allowed=allowed, note=note, step=self.step)
                for key, row, note in rows
            ]
            # What nobody declared comes first, or a long list of declared differences would push it out.
            order = sorted(range(len(rows)), key=lambda index: not judged[index].is_red)
            for key, row, note in [rows[index] for index in order[:MAX_NAMED]]:
                at = self._located(group, key, row)
                found.append(
                    difference(key, row, kind=kind, domain=domain, allowed=allowed, note=note, found=at, step=self.step)
                )
        return group_check(group, found, names, num_keys), found

    def _scopes(self, group: str) -> list[tuple[str, list[int]]]:
        """Topology is one for the whole job: ranks that differ in it also claim different domains."""
        if not any(group in d.shas for d in self.digests):
            return []
        if group == TOPOLOGY:
            return [("", [d.rank for d in self.digests])]
        domains = dict.fromkeys(d.domain for d in self.digests)
        return [(domain, [d.rank for d in self.digests if d.domain == domain]) for domain in sorted(domains)]

    def _facts(self, rank: int, group: str) -> RankFacts | None:
        sha = self._digest(rank).shas.get(group, "")
        if (group, sha) not in self._known:
            # Whoever has the same hash says the same: a rank that died since does not matter.
            alike = (d.rank for d in self.digests if d.rank != rank and d.shas.get(group, "") == sha)
            answers = (self.fetch(one, {"group": group}) for one in (rank, *alike))
            answer = next((found for found in answers if found is not None), None)
            self._known[group, sha] = None if answer is None else RankFacts.model_validate(answer)
        return self._known[group, sha]

    def _digest(self, rank: int) -> ParityDigest:
        return next(d for d in self.digests if d.rank == rank)

    def _rows(self, facts: Mapping[int, RankFacts], group: str) -> list[tuple[str, Groups, str]]:
        keys = sorted({key for known in facts.values() for key in known.groups.get(group, {})})
        rows = [(key, groups_of({r: f.groups.get(group, {}).get(key) for r, f in facts.items()}), "") for key in keys]
        different = [row for row in rows if len(row[1]) > 1]
        return [row for row in different if group != WEIGHTS or _is_news(row[1])]

    def _misfits(self, facts: Mapping[int, RankFacts]) -> list[tuple[str, Groups, str]]:
        rows: list[tuple[str, Groups, str]] = []
        for name in sorted({name for known in facts.values() for name in known.shards}):
            have = {rank: known.shards[name] for rank, known in facts.items() if name in known.shards}
            values = {rank: shard_text(have[rank]) if rank in have else None for rank in facts}
            if len(have) < len(facts):
                rows.append((f"shard {name}", groups_of(values), "sharded on some ranks only"))
            elif (wrong := misfit(have)) and len(have) > 1:
                rows.append((f"shard {name}", groups_of(values), wrong))
        return rows

    def _located(self, group: str, key: str, row: Groups) -> str:
        if group != WEIGHTS:
            return ""
        name = key.removeprefix("weight ")
        found = located(self.fetch, row, lambda span: {"elements": name, **span})
        return "" if found is None else element_text(found, row)

    def _undeclared(self) -> list[Check]:
        scopes = [(domain, ranks) for domain, ranks in self._scopes(UNDECLARED) if len(ranks) > 1]
        rows: list[str] = []
        num = 0
        for _, ranks in scopes:
            known = {rank: facts for rank in ranks if (facts := self._facts(rank, UNDECLARED)) is not None}
            num = max([num, *(_size(facts, UNDECLARED) for facts in known.values())])
            rows += [
                f"{key}: {' | '.join(ranks_text(r) for r, _ in row)}" for key, row, _ in self._rows(known, UNDECLARED)
            ]
        if not num:
            return []
        hint = ["say which tensors are shards with sharded=[...]; then the others are checked as replicated"]
        return [
            Check(
                name="weights nobody declared",
                mode="",
                status=Status.INFO,
                expected="not judged: replicated or sharded is not known",
                observed=f"{len(rows)} of {num} differ between ranks" if rows else f"all {num} are bit-equal",
                details=tuple([*rows[:MAX_LISTED], *(hint if rows else [])]),
            )
        ]

    def _changed_everywhere(self) -> list[Check]:
        """What changed on all ranks of a group is no difference: a load of new weights looks like that."""
        common: set[str] = set()
        for _, ranks in self._scopes(CHANGES):
            known = [
                set(facts.groups.get(CHANGES, {})) for r in ranks if (facts := self._facts(r, CHANGES)) is not None
            ]
            common |= set.intersection(*known) if known else set()
        if not common:
            return []
        return [
            Check(
                name="weights changed on all ranks",
                mode="",
                status=Status.INFO,
                expected="none, with frozen weights",
                observed=f"{len(common)} changed on all ranks of a group",
                details=tuple(sorted(common)[:MAX_LISTED]),
            )
        ]

    def _own(self) -> list[Check]:
        keys = sorted({key for d in self.digests for key in d.own})
        rows = {key: groups_of({d.rank: d.own.get(key) for d in self.digests}) for key in keys}
        different = {key: row for key, row in rows.items() if len(row) > 1}
        if not different:
            return []
        details = [
            f"{key}: {', '.join(f'{v} on rank {ranks_text(r)}' for r, v in row)}" for key, row in different.items()
        ]
        return [
            Check(
                name="normalised",
                mode="",
                status=Status.INFO,
                expected="differs by nature, not compared",
                observed=", ".join(different),
                details=tuple(details),
            )
        ]

    def _equal(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        def same(digest: ParityDigest) -> str:
            return str([sha for group, sha in sorted(digest.shas.items()) if group not in (SHARDS, UNDECLARED)])

        by_domain: dict[str, dict[int, str | None]] = {}
        for digest in self.digests:
            by_domain.setdefault(digest.domain, {})[digest.rank] = same(digest)
        return {domain: tuple(ranks for ranks, _ in groups_of(values)) for domain, values in by_domain.items()}


def _is_news(row: Groups) -> bool:
    """False when the dtype policy names it already: not there on all ranks, or of another dtype."""
    dtypes = {value.partition("[")[0] if value is not None else None for _, value in row}
    return len(dtypes) == 1 and None not in dtypes


def _size(facts: RankFacts, group: str) -> int:
    return len(facts.shards) if group == SHARDS else len(facts.groups.get(group, {}))
