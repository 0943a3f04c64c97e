"""Digests of all ranks, and their facts where hashes differ -> `Verdict`: checks by group, differences by key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    _known: dict[tuple[str, str], RankFacts | None] = field(default_factory=dict)

    def verdict(self) -> Verdict:
        """All checks of all groups."""
        checks = [reported(len(self.digests), self.absent, timeout_s=self.timeout_s), *self._answered()]
        divergences: list[Divergence] = []
        for group in KINDS:
            if self._is_asked(group):
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

    # What the ranks sent.

    def _is_asked(self, group: str) -> bool:
        return any(group in digest.shas for digest in self.digests)

    def _scopes(self, group: str) -> dict[str, list[int]]:
        """Domain -> ranks. Topology is one for the whole job: ranks that differ in it also claim different domains."""
        if not self._is_asked(group):
            return {}
        found: dict[str, list[int]] = {}
        for digest in sorted(self.digests, key=lambda digest: digest.domain):
            found.setdefault("" if group == TOPOLOGY else digest.domain, []).append(digest.rank)
        return found

    def _sha(self, rank: int, group: str) -> str:
        by_rank = {digest.rank: digest for digest in self.digests}
        return by_rank[rank].shas.get(group, "")

    def _facts(self, rank: int, group: str) -> RankFacts | None:
        sha = self._sha(rank, group)
        if (group, sha) not in self._known:
            # Whoever has the same hash says the same: a rank that died since does not matter.
            alike = [digest.rank for digest in self.digests if digest.shas.get(group, "") == sha]
            self._known[group, sha] = self._first_answer(dict.fromkeys([rank, *alike]), group)
        return self._known[group, sha]

    def _first_answer(self, ranks: Iterable[int], group: str) -> RankFacts | None:
        for rank in ranks:
            answer = self.fetch(rank, {"group": group})
            if answer is not None:
                return RankFacts.model_validate(answer)
        return None

    def _known_facts(self, ranks: Sequence[int], group: str) -> dict[int, RankFacts]:
        """Facts of the ranks that answered."""
        found = {rank: self._facts(rank, group) for rank in ranks}
        return {rank: facts for rank, facts in found.items() if facts is not None}

    # Groups of facts that are judged.

    def _group(self, group: str) -> tuple[Check, list[Divergence]]:
        found: list[Divergence] = []
        names: list[str] = []
        num_keys = 0
        for domain, ranks in self._scopes(group).items():
            known = self._known_facts(ranks, group)
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
        shas = {rank: self._sha(rank, group) for rank in ranks}
        texts = {rank: f"sha256:{sha}" if sha else None for rank, sha in shas.items()}
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
        of_rank = {rank: known.groups.get(group, {}) for rank, known in facts.items()}
        found = []
        for key in sorted(set().union(*of_rank.values())):
            row = groups_of({rank: values.get(key) for rank, values in of_rank.items()})
            is_news = group != WEIGHTS or _is_news(row)
            if len(row) > 1 and is_news:
                found.append(_Found(key, row))
        return found

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
        name = row.key.removeprefix("weight ")
        found = located(self.fetch, row.groups, lambda span: {"elements": name, **span})
        return "" if found is None else element_text(found, row.groups)

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
        num = 0
        for ranks in self._scopes(UNDECLARED).values():
            if len(ranks) < 2:
                continue
            known = self._known_facts(ranks, UNDECLARED)
            num = max([num, *(_size(facts, UNDECLARED) for facts in known.values())])
            rows += [f"{row.key}: {_who(row.groups)}" for row in self._rows(known, UNDECLARED)]
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
            known = self._known_facts(ranks, CHANGES).values()
            changed = [set(facts.groups.get(CHANGES, {})) for facts in known]
            common |= set.intersection(*changed) if changed else set()
        if not common:
            return []
        observed = f"{len(common)} changed on all ranks of a group"
        shown = sorted(common)[:MAX_LISTED]
        return [_information("weights changed on all ranks", "none, with frozen weights", observed, shown)]

    def _own(self) -> list[Check]:
        different = {}
        for key in sorted(set[str]().union(*(digest.own for digest in self.digests))):
            row = groups_of({digest.rank: digest.own.get(key) for digest in self.digests})
            if len(row) > 1:
                different[key] = ", ".join(f"{value} on rank {ranks_text(ranks)}" for ranks, value in row)
        if not different:
            return []
        details = [f"{key}: {values}" for key, values in different.items()]
        return [_information("normalised", "differs by nature, not compared", ", ".join(different), details)]

    def _equal(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Domain -> groups of ranks that hold the same, shards apart."""
        by_domain: dict[str, dict[int, str | None]] = {}
        for digest in self.digests:
            compared = {group: sha for group, sha in digest.shas.items() if group not in (SHARDS, UNDECLARED)}
            by_domain.setdefault(digest.domain, {})[digest.rank] = str(sorted(compared.items()))
        return {domain: tuple(ranks for ranks, _ in groups_of(values)) for domain, values in by_domain.items()}


def _information(name: str, expected: str, observed: str, details: Sequence[str]) -> Check:
    return Check(name=name, mode="", status=Status.INFO, expected=expected, observed=observed, details=tuple(details))


def _who(groups: Groups) -> str:
    return " | ".join(ranks_text(ranks) for ranks, _ in groups)


def _is_news(row: Groups) -> bool:
    """False when the dtype policy names it already: not there on all ranks, or of another dtype."""
    dtypes = {value.partition("[")[0] if value is not None else None for _, value in row}
    return len(dtypes) == 1 and None not in dtypes


def _size(facts: RankFacts, group: str) -> int:
    return len(facts.shards) if group == SHARDS else len(facts.groups.get(group, {}))
