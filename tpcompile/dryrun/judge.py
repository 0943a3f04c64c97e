"""What the ranks of a dry run left -> one verdict, with the comparison of the gate."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from tpcompile.dryrun.forks import Ended
from tpcompile.dryrun.plan import Plan
from tpcompile.errors import ConfigError, ExitCode
from tpcompile.evidence.digests.digest import environment_items, layer_items
from tpcompile.evidence.judgement.verdict import Absent, capture_rules, conclude
from tpcompile.evidence.records import Check, Item, Layer, RankDigest, RankRecord, Status, Verdict
from tpcompile.evidence.records.reader import read_object, validated
from tpcompile.evidence.rundir import RunDir

_OF_RANK = {"rank", "domain", "coordinate", "places", "rank_reads", "facts"}
"""Fields in which ranks that compiled the same differ."""
_MAX_READ = 32
"""Records in memory at a time."""


class Judge:
    """Takes ranks as they end. Outside of the first group, what several ranks of a group compiled is kept once."""

    def __init__(self, plan: Plan, run_dir: RunDir, *, limit_s: float, num_breaks: int) -> None:
        self.plan, self.run_dir, self.limit_s, self.num_breaks = plan, run_dir, limit_s, num_breaks
        self.digests: list[RankDigest] = []
        self.failed: list[Check] = []
        self.absent: list[Absent] = []
        self.allow: dict[tuple[Layer, str, str], None] = {}
        self._alike: dict[tuple[str, str], int] = {}
        """Domain, and hash of what a rank compiled -> the first rank whose record has it."""
        self._same_as: dict[int, int] = {}
        self._record = lru_cache(_MAX_READ)(self._read)

    def take(self, ended: Ended) -> None:
        """A rank that has ended. Raises ConfigError where the target cannot be built on it."""
        rank, left = ended.rank, ended.left
        if left is None:
            self.absent.append(Absent(rank, ended.how))
            return
        if left.digest is None:
            raise ConfigError(left.refused)
        self.digests.append(left.digest)
        self.allow |= dict.fromkeys(left.allow)
        if left.failed is not None:
            self.failed.append(left.failed)
        content = left.digest.model_dump_json(exclude=_OF_RANK)
        key = left.digest.domain, hashlib.sha256(content.encode()).hexdigest()
        first = self._alike.setdefault(key, rank)
        self._same_as[rank] = first
        if first != rank and not self.plan.lowers(rank):
            (self.run_dir.path / f"rank_{rank}" / "record.json").unlink()

    def verdict(self) -> Verdict:
        """The verdict on all ranks so far."""
        rules = capture_rules(**self.judged_by())
        found = conclude(
            rules,
            sorted(self.digests, key=lambda digest: digest.rank),
            self._fetch,
            world_size=self.plan.world_size,
            absent=self.absent,
            problems=tuple(_joined(self.failed)),
        )
        return _with_number(found, self.plan, len(self.digests) + len(self.absent))

    def judged_by(self) -> dict[str, Any]:
        """What `run.json` has to hold for the run to be judged again."""
        return {"timeout_s": self.limit_s, "allowed": tuple(self.allow), "num_breaks": self.num_breaks}

    def _fetch(self, rank: int, index: int, layer: Layer, part: str) -> Sequence[Item]:
        record = self._record(self._same_as[rank])
        return environment_items(record) if index < 0 else layer_items(record.compiles[index], layer, part)

    def _read(self, rank: int) -> RankRecord:
        path = self.run_dir.path / f"rank_{rank}" / "record.json"
        return validated(RankRecord, read_object(path), path)


def _joined(failed: Iterable[Check]) -> list[Check]:
    """One check for the ranks that ended with the same exception."""
    found: dict[str, Check] = {}
    for check in sorted(failed, key=lambda check: check.ranks):
        key = check.model_dump_json(exclude={"ranks"})
        ranks = (*found[key].ranks, *check.ranks) if key in found else check.ranks
        found[key] = check.model_copy(update={"ranks": ranks})
    return list(found.values())


def _with_number(verdict: Verdict, plan: Plan, num_traced: int) -> Verdict:
    """The verdict, which says how many ranks were traced where that is not all; of a sample, it is incomplete."""
    if num_traced == plan.world_size:
        return verdict
    said = f"{num_traced:,} of {plan.world_size:,} ranks were traced"
    if not plan.is_sample:
        summary = f"{verdict.summary}; {said}: on the first, no line outside of torch was seen to learn the rank"
        return verdict.model_copy(update={"summary": summary})
    update: dict[str, object] = {"summary": f"{verdict.summary}; {said}, seed {plan.seed}"}
    if verdict.exit_code == ExitCode.PASS:
        update |= {"status": Status.SKIPPED, "exit_code": ExitCode.INCOMPLETE}
    return verdict.model_copy(update=update)
