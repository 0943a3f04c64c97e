"""A program on two simulated ranks of this process, one after the other -> the verdict on what they compiled.

The ranks have a group that communicates nothing, so that a program in which real ranks would hang comes to its end.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.rank_taint import SUGGESTIONS
from tpcompile.evidence.judgement.verdict import capture_rules, conclude, fetch_from
from tpcompile.evidence.records import RankRecord, Verdict
from tpcompile.evidence.records.causes import ADVICE, Cause
from tpcompile.evidence.records.compile import TaintKind
from tpcompile.recording import CaptureSession

WORLD_SIZE = 2
Body = Callable[["Rank"], None]


@dataclass(frozen=True)
class Rank:
    """Where a program runs."""

    rank: int
    follows: bool
    """Whether it does what the sentence says."""

    @property
    def is_odd(self) -> bool:
        """True on the rank that goes wrong, unless the advice is followed."""
        return self.rank == 1 and not self.follows

    @property
    def group(self) -> Any:
        """All ranks."""
        return dist.group.WORLD


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that shows what a sentence is worth."""

    key: Cause | TaintKind
    """Of the table that has the sentence."""
    sentence: str
    body: Body
    allowed: tuple[tuple[str, str, str], ...] = ()
    """Differences that are declared where the sentence is followed."""
    around: Callable[[Rank], AbstractContextManager[Any]] = lambda _: nullcontext()
    """Settings of a rank from before it is recorded."""


_PROGRAMS: list[Program] = []


def declared() -> list[Program]:
    """All of them."""
    importlib.import_module("tests.advice.programs")
    return _PROGRAMS


def advised(cause: Cause, number: int = 0, **fields: Any) -> Callable[[Body], Body]:
    """Declare the program of a sentence of a cause, the first by default."""

    def declare(body: Body) -> Body:
        _PROGRAMS.append(Program(key=cause, sentence=ADVICE[cause][number], body=body, **fields))
        return body

    return declare


def suggested(kind: TaintKind) -> Callable[[Body], Body]:
    """Declare the program of what is suggested for a kind of taint."""

    def declare(body: Body) -> Body:
        _PROGRAMS.append(Program(key=kind, sentence=SUGGESTIONS[kind], body=body))
        return body

    return declare


def verdict(program: Program, *, follows: bool) -> Verdict:
    """What `tpcompile.check` would say of the program."""
    records = [_record(program, Rank(rank, follows)) for rank in range(WORLD_SIZE)]
    allowed = program.allowed if follows else ()
    rules = replace(capture_rules(timeout_s=1, allowed=allowed), taint="fail")
    return conclude(rules, [digest_rank(one) for one in records], fetch_from(records), world_size=WORLD_SIZE)


def _record(program: Program, at: Rank) -> RankRecord:
    torch.compiler.reset()
    torch.manual_seed(0)
    with _in_group(at.rank), program.around(at):
        session = CaptureSession(groups={dist.group.WORLD.group_name: "tp"})
        with session:
            program.body(at)
        return session.record(rank=at.rank, world_size=WORLD_SIZE, domain="tp", coordinate=at.rank, tp_size=WORLD_SIZE)


@contextmanager
def _in_group(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _told(found: Verdict) -> dict[str, Any]:
    """What is asserted of a verdict."""
    kinds = [taint.kind.value for taint in found.taints if not taint.reason]
    return {
        "exit_code": found.exit_code,
        "cause": found.lead.cause.value if found.lead else "",
        "says": found.summary,
        "taints": kinds,
    }


def main() -> None:
    """Print what became of each program: its key, its sentence, and the verdicts as it is and followed."""
    import json

    rows = {}
    for program in declared():
        found = [verdict(program, follows=follows) for follows in (False, True)]
        name = program.body.__name__
        assert name not in rows, name
        rows[name] = {"key": program.key.value, "sentence": program.sentence, "verdicts": list(map(_told, found))}
    print(json.dumps(rows))


if __name__ == "__main__":
    from tests.advice.played import main as played

    played()
