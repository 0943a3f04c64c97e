"""One rank of the job, in the process that was forked for it -> what it leaves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tpcompile.dryrun.plan import Asked, Plan
from tpcompile.dryrun.reads import traced_reads
from tpcompile.dryrun.trace import Traced, installed_modules, traced
from tpcompile.errors import TpCompileError
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.records import Check, Frozen, Layer, RankDigest, UserLine
from tpcompile.evidence.rundir import RunDir
from tpcompile.evidence.text.ranks import exact_ranks
from tpcompile.ranks.env import local_variables
from tpcompile.recording.flow import FlowRecorder
from tpcompile.torch_api.hooks import compile_callbacks

_RANKS_PER_NODE = 8
"""LOCAL_RANK and LOCAL_WORLD_SIZE of a rank are those of nodes of so many."""
_PORT = 29500
"""MASTER_PORT, which nobody serves: the store of a fake group is none."""
_OF_RANK: Any = {
    **dict.fromkeys(("rank", "domain", "coordinate", "places", "rank_reads", "facts"), True),
    "compiles": {"__all__": {"normalised"}},  # ids of objects
    "counters": {"__all__": {"frames"}},  # Dynamo counts those of the watch
}
"""Fields of a digest in which ranks that compiled the same differ."""


_GRAPH = "<eval_with_key>"
"""File of the code of a graph: what it reads, the code that was traced reads."""


class Group(Frozen):
    """A process group that a rank made."""

    name: str
    """Its axis of a mesh, or its description."""
    ranks: str
    line: UserLine | None = None


class Left(Frozen):
    """What the process of a rank leaves beside its record."""

    digest: RankDigest | None = None
    """None where the target cannot be built, and where `same_as` has it."""
    content: str = ""
    """Hash of what it compiled: equal for ranks that compiled the same."""
    start: str = ""
    """Hash of what its calls started from; empty where that is not known."""
    is_told_by_start: bool = False
    """Its calls were watched: they neither read the rank nor drew random numbers, so an equal start is an equal end."""
    same_as: int | None = None
    """The rank with the same start, which was traced."""
    domain: str = ""
    coordinate: int = 0
    """Place among the ranks of its domain."""
    places: dict[str, int] = {}
    groups: str = ""
    """Hash of the process groups that it made."""
    groups_made: tuple[Group, ...] = ()
    """These groups, in order; empty where a rank before it has left equal ones."""
    allow: tuple[tuple[Layer, str, str], ...] = ()
    failed: Check | None = None
    refused: str = ""
    """Why the target cannot be built, one line; there is no digest then."""
    reads: tuple[UserLine, ...] = ()
    """Lines outside of torch that read the rank, of a rank that was watched."""
    imported: tuple[str, ...] = ()
    """Modules of installed packages that it imported, of the first rank."""


def leave(plan: Plan, rank: int, run_dir: RunDir, asked: Asked) -> None:
    """Build the target as this rank, and call it unless its calls start as those of a rank that was traced.

    Writes its record and `rank_N/left.json`.
    """
    on_node = min(_RANKS_PER_NODE, plan.world_size)
    os.environ.update(local_variables(rank, plan.world_size, _PORT))
    os.environ.update({"LOCAL_RANK": str(rank % on_node), "LOCAL_WORLD_SIZE": str(on_node)})
    before = installed_modules() if asked.is_first else {}
    try:
        with _recorded_lines(asked.ring):
            found = traced(plan, rank, asked)
    except TpCompileError as error:
        left = Left(refused=str(error))
    else:
        left = _left(found, run_dir, asked)
        if asked.is_first:
            imported = tuple(name for name in installed_modules() if name not in before)
            left = left.model_copy(update={"imported": imported})
    run_dir.write_text(left_name(rank), left.model_dump_json())


@contextmanager
def _recorded_lines(ring: str) -> Iterator[None]:
    """Record what the program executes, not what a compiler calls of it for its own ends; the ring outlives the rank.

    Before Python 3.12 that costs several times the trace.
    """
    if not ring:
        yield
        return
    lines = FlowRecorder()
    lines.start(ring, by_settrace=True)
    with compile_callbacks(lambda _: lines.pause(True), lambda _: lines.pause(False)):
        yield


def _left(found: Traced, run_dir: RunDir, asked: Asked) -> Left:
    text_of_groups = "\n".join(f"{made.name} {made.ranks}" for made in found.groups)
    hash_of_groups = hashlib.sha256(text_of_groups.encode()).hexdigest()
    groups = tuple(
        Group(name=made.name.removeprefix("mesh_"), ranks=exact_ranks(made.ranks), line=made.line)
        for made in found.groups
    )
    left = Left(
        start=found.start,
        same_as=found.same_as,
        domain=found.domain.name,
        coordinate=found.domain.coordinate,
        places=found.places,
        groups=hash_of_groups,
        groups_made=() if hash_of_groups in asked.groups else groups,
        allow=tuple((Layer(layer), text, why) for layer, text, why in found.allow),
        failed=found.failed,
    )
    if found.record is None:
        return left
    run_dir.write_record(found.record)
    digest = digest_rank(found.record)
    executed = {line: None for line in found.reads_in_calls if not line.file.startswith(_GRAPH)}
    in_calls = {**executed, **traced_reads(digest)}
    content = digest.model_dump_json(exclude=_OF_RANK)
    update = {
        "digest": digest,
        "content": hashlib.sha256(content.encode()).hexdigest(),
        "is_told_by_start": found.is_watched and not in_calls and not found.draws and found.failed is None,
        "reads": tuple({**found.reads_in_build, **in_calls}),
    }
    return left.model_copy(update=update)


def left_name(rank: int) -> str:
    """Name of the file in the run directory."""
    return f"rank_{rank}/left.json"
