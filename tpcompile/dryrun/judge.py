"""What the ranks of a dry run left -> one verdict, with the comparison of the gate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from tpcompile.dryrun.forks import Ended
from tpcompile.dryrun.group_order import GroupOrder
from tpcompile.dryrun.plan import Plan
from tpcompile.errors import ConfigError, ExitCode
from tpcompile.evidence.digests.digest import environment_items, layer_items
from tpcompile.evidence.judgement.verdict import Absent, capture_rules, conclude
from tpcompile.evidence.records import Check, Item, Layer, RankDigest, RankRecord, Status, Verdict
from tpcompile.evidence.records.reader import read_object, validated
from tpcompile.evidence.rundir import RunDir

_MAX_READ = 32
"""Records in memory at a time."""


class Judge:
    """Takes ranks as they end. Outside of the first group, what all ranks of a group compiled is kept once."""

    def __init__(self, plan: Plan, run_dir: RunDir, *, limit_s: float, num_breaks: int) -> None:
        self.plan, self.run_dir, self.limit_s, self.num_breaks = plan, run_dir, limit_s, num_breaks
        self.num_traced = 0
        self.stopped_with: ExitCode | None = None
        """Exit code of a run that was stopped before all of its ranks were traced."""
        self._digests: dict[int, RankDigest] = {}
        self._groups = GroupOrder()
        self.failed: list[Check] = []
        self.absent: list[Absent] = []
        self.allow: dict[tuple[Layer, str, str], None] = {}
        self._traced: defaultdict[str, dict[str, list[int]]] = defaultdict(dict)
        """Domain -> hash of what a rank compiled -> the ranks that were traced and compiled it."""
        self._same_as: dict[int, int] = {}
        self._record = lru_cache(_MAX_READ)(self._read)

    def take(self, ended: Ended) -> None:
        """A rank that has ended. Raises ConfigError where the target cannot be built on it."""
        rank, left = ended.rank, ended.left
        if left is None:
            self.absent.append(Absent(rank, ended.how))
            return
        if left.refused:
            raise ConfigError(left.refused)
        digest = left.digest
        if left.same_as is not None:  # what it would have left: its calls start as those of the rank that was traced
            place = {"rank": rank, "domain": left.domain, "coordinate": left.coordinate, "places": left.places}
            digest = self._digests[left.same_as].model_copy(update=place)
        assert digest is not None
        self._digests[rank] = digest
        self._groups.take(rank, left)
        self.allow |= dict.fromkeys(left.allow)
        if left.failed is not None:
            self.failed.append(left.failed)
        if left.same_as is not None:
            self._same_as[rank] = self._same_as[left.same_as]
            return
        by_content = self._traced[left.domain]
        alike = by_content.setdefault(left.content, [])
        alike.append(rank)
        self._same_as[rank] = alike[0]
        self.num_traced += 1

    def verdict(self) -> Verdict:
        """The verdict on all ranks so far."""
        rules = capture_rules(**self.judged_by())
        found = conclude(
            rules,
            [digest for _, digest in sorted(self._digests.items())],
            self._fetch,
            world_size=self.plan.world_size,
            absent=self.absent,
            problems=(*self._groups.problems(), *_joined(self.failed)),
        )
        self._keep_once()
        return self._with_number(found)

    def _with_number(self, verdict: Verdict) -> Verdict:
        """The verdict, which says how many ranks were traced where that is not all; of a sample, it is incomplete."""
        num_seen, world_size = len(self._digests) + len(self.absent), self.plan.world_size
        said = f"{self.num_traced:,} of {world_size:,} ranks were traced"
        is_all = num_seen == world_size and self.num_traced + len(self.absent) == num_seen
        if is_all:
            return verdict
        if num_seen == world_size:
            said += ", and the calls of the others start from what these start from"
        elif self.stopped_with is not None:
            said += " before it was stopped"
        elif self.plan.is_sample:
            said += f", seed {self.plan.seed}"
        else:
            said += ": on the first, no line outside of torch was seen to learn the rank"
        update: dict[str, object] = {"summary": f"{verdict.summary}; {said}"}
        is_part = self.plan.is_sample or self.stopped_with is not None
        if is_part and verdict.exit_code == ExitCode.PASS:
            update |= {"status": Status.SKIPPED, "exit_code": ExitCode.INCOMPLETE}
        return verdict.model_copy(update=update)

    def judged_by(self) -> dict[str, Any]:
        """What `run.json` has to hold for the run to be judged again."""
        return {"timeout_s": self.limit_s, "allowed": tuple(self.allow), "num_breaks": self.num_breaks}

    def _keep_once(self) -> None:
        """Remove records that a rank of the same domain has, too; where its ranks differ, the majority is in them."""
        for by_content in self._traced.values():
            alike = [rank for ranks in by_content.values() for rank in ranks if not self.plan.lowers(rank)]
            for rank in alike[1:] if len(by_content) == 1 else ():
                (self.run_dir.path / f"rank_{rank}" / "record.json").unlink()

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
