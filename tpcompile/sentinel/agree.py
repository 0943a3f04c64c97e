"""A compile of this rank, before its code runs -> post, wait for the others where that is needed, verdict.

Waiting is only for code with collectives: it could not finish without the others anyway, and code without them may be
compiled in any order. Whoever posts last compares; nobody waits for a rank that went past, for it says so.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from tpcompile.evidence.digest import digest_compile
from tpcompile.evidence.records import CompileDigest, CompileRecord, Layer
from tpcompile.sentinel.clock import RUNNING, WAITING
from tpcompile.sentinel.messages import CompilePost, Position

if TYPE_CHECKING:
    from tpcompile.sentinel.sentinel import Sentinel

OK, PASSED, GO = "ok", "passed", "go on"
"""Decisions on a position: all ranks agree; one went past it; the ranks have settled what that means."""
_PROGRAM = (Layer.INPUTS, Layer.GRAPH, Layer.GUARDS)


def agree(sentinel: Sentinel, position: Position, compile_: CompileRecord, *, may_wait: bool) -> None:
    """Called on the compiling thread after the compile, before its code runs for the first time.

    `may_wait` is False for a compile that failed: an exception is on its way, or the frame runs eager from here on.
    """
    region = sentinel.clock.region(position.region)
    if len(sentinel.channel.members) == 1 or region.is_reported:
        return
    mine = post_of(sentinel.rank, digest_compile(compile_, 0), len(compile_.collectives), region.reason_uneven)
    sentinel.expect(position)
    is_last, is_equal = sentinel.channel.post(position, mine)
    if is_last and is_equal:
        sentinel.channel.decide(position, OK)
    elif is_last:
        sentinel.problems.raise_difference(position)
    issues = (mine.frame, mine.collectives)
    is_new = issues not in region.collectives
    needs_others = bool(mine.num_collectives or region.num_collectives)
    region.collectives.add(issues)
    region.num_collectives = mine.num_collectives
    if is_new or not region.reason_uneven:
        sentinel.follower.ended_compile(position)
    if may_wait and needs_others and (is_new or not region.reason_uneven):
        _wait(sentinel, position)


def post_of(rank: int, digest: CompileDigest, num_collectives: int, uneven: str) -> CompilePost:
    """What the other ranks compare; of a region declared uneven, its collectives only."""
    program = "" if uneven else _sha(digest, _PROGRAM)
    lowered = "" if uneven else _sha(digest, (Layer.LOWERED, Layer.KERNELS))
    return CompilePost(
        rank=rank,
        frame=digest.frame,
        program=program,
        collectives=_sha(digest, (Layer.COLLECTIVES,)),
        lowered=lowered,
        num_collectives=num_collectives,
    )


def _sha(digest: CompileDigest, layers: tuple[Layer, ...]) -> str:
    text = "".join(f"{x.layer}{x.part}{x.sha256}" for x in digest.layers if x.layer in layers)
    return hashlib.sha256(text.encode()).hexdigest()


def _wait(sentinel: Sentinel, position: Position) -> None:
    clock = sentinel.clock
    clock.waits_at = position
    clock.set(WAITING)
    try:
        sentinel.wait_for_verdict(position)
    finally:
        clock.waits_at = None
        clock.set(RUNNING)
