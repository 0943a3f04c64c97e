"""Messages between ranks through the store, and properties derived from them: frozen records, JSON."""

from __future__ import annotations

import hashlib
from typing import Literal

from tpcompile.evidence.digests.digest import digest_compile
from tpcompile.evidence.iterables import first, last
from tpcompile.evidence.layers.equivalent import LOCAL_TENSOR
from tpcompile.evidence.records import CompileDigest, CompileRecord, Frozen, Layer, UserLine
from tpcompile.evidence.records.base import at_text
from tpcompile.evidence.records.bounds import Number, Rank, Seconds
from tpcompile.evidence.text.lines import of_program
from tpcompile.evidence.timeline.stream import Place, place_of

_EVEN = frozenset({"all_reduce", "allreduce", "all_gather_base", "allgather_base", "reduce_scatter_base", "barrier"})
"""Collectives, as the flight recorder names them, whose sizes are equal on all ranks of a group."""
_ONE_DTYPE = frozenset({"all_to_all", "alltoall_base", "broadcast", "all_gather", "allgather", "reduce_scatter"})
"""Others to which all ranks pass tensors of one dtype; a root alone passes what it scatters."""
RUNNING, COMPILING, WAITING = "running", "compiling", "waiting"
TRIGGERS = {
    "dynamo": COMPILING,
    "lazy_backward": "compiling the backward of",
    "cudagraph_recording": "recording a CUDA graph of",
    "triton_autotuning": "autotuning",
}
"""torch's compile event -> activity of the rank."""
COMPILES = frozenset(TRIGGERS.values())
FINISHED = "finished"
"""`ended` of a rank that left at the end of the watched block."""
Key = tuple[str, Place]


class Position(Frozen):
    """Where a rank is: the `index`-th frame of the `call`-th call of a region."""

    region: str
    call: Number
    index: Number

    @property
    def place(self) -> tuple[int, int]:
        """(call, index): the order of positions in one region."""
        return self.call, self.index

    @property
    def key(self) -> str:
        """Text for store keys."""
        return f"{self.region}/{self.call}.{self.index}"

    def __str__(self) -> str:
        return f"call {self.call} of {self.region}" + (f", frame {self.index}" if self.index else "")


class Announcement(Frozen):
    """A rank begins to compile, the first one at this position."""

    rank: Rank
    position: Position
    compile_id: str
    reason: str = ""
    """The failed guard as torch prints it; empty for a first compile."""
    line: UserLine | None = None
    """The user's call of the compiled code."""
    num_issued: int = 0
    """Number of collectives that the rank had issued before a region without any; 0 where calls alone count."""
    between: Number = 1
    """How many compiles of the region the rank has begun since the last collective, this one among them."""


class CompilePost(Frozen):
    """What a rank compiled at a position, as hashes."""

    rank: Rank
    frame: str
    program: str
    """Hash of graph, guards, inputs and breaks."""
    collectives: str
    lowered: str
    """Hash of AOT graphs and kernels; empty where they were not observed."""
    num_collectives: Number
    """0 for code that may run before the other ranks have compiled it."""


_PROGRAM = (Layer.INPUTS, Layer.GRAPH, Layer.GUARDS)


def post_of(rank: int, compile_: CompileRecord, *, is_uneven: bool) -> CompilePost:
    """Hashes that the other ranks compare; for a region declared uneven, of its collectives only."""
    digest = digest_compile(compile_, 0)
    program = "" if is_uneven else _sha(digest, _PROGRAM)
    lowered = "" if is_uneven else _sha(digest, (Layer.LOWERED, Layer.KERNELS))
    # Those of DTensor parameters under a backend that does not lower are not recorded. DTensor arguments do not count:
    # one rank alone may read them, e.g. to log.
    sources = [guard.source for guard in compile_.guards if guard.source.endswith(LOCAL_TENSOR)]
    is_sharded = any("_parameters[" in source for source in sources)
    has_unseen = is_sharded and not is_uneven and not compile_.has_lowered
    return CompilePost(
        rank=rank,
        frame=digest.frame,
        program=program,
        collectives=_sha(digest, (Layer.COLLECTIVES,)),
        lowered=lowered,
        num_collectives=len(compile_.collectives) or int(has_unseen),
    )


def _sha(digest: CompileDigest, layers: tuple[Layer, ...]) -> str:
    texts = [f"{layer.layer}{layer.part}{layer.sha256}" for layer in digest.layers if layer.layer in layers]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


class Issued(Frozen):
    """One collective in the flight recorder, issued by this rank."""

    group: str
    """`name description` of the process group; equal on all its ranks."""
    seq: Number
    """Number among the collectives of the group, from 1."""
    op: str
    sizes: str = ""
    dtypes: str = ""
    is_done: bool = True
    age_s: Seconds = 0.0
    stack: tuple[UserLine, ...] = ()
    """The user's frames, innermost first."""
    call_line: UserLine | None = None
    """The user's call of the compiled code that issued it; None outside of compiled code."""
    region: str = ""
    """Region of that call."""
    call: Number = 0
    """Number of that call."""

    @property
    def line(self) -> UserLine | None:
        """The user's line that issued it."""
        return first(self.stack)

    @property
    def id(self) -> tuple[str, int]:
        """Group and number: one collective, on all ranks of the group."""
        return self.group, self.seq

    @property
    def place(self) -> Place:
        """Files and lines from which it was issued."""
        return place_of(reversed(self.stack))

    @property
    def is_at_first_line(self) -> bool:
        """True for the first line of its region's function, where compiled code stands whatever line issues it."""
        return self.line is not None and self.region.endswith(f":{self.line.line}")

    @property
    def has_own_sizes(self) -> bool:
        """True when sizes may differ between ranks; it completes on a rank once that rank's sizes match."""
        return self.op not in _EVEN

    @property
    def what(self) -> str:
        """What must be equal on all ranks: the op, and its sizes and dtypes if these may not differ."""
        return " ".join([self.op, *self.common.values()])

    @property
    def common(self) -> dict[str, str]:
        """Sizes and dtypes, as far as these must be equal on all ranks."""
        if not self.has_own_sizes:
            return {"sizes": self.sizes, "dtypes": self.dtypes}
        return {"dtypes": ",".join(sorted(set(self.dtypes.split(","))))} if self.op in _ONE_DTYPE else {}

    @property
    def own(self) -> dict[str, str]:
        """Sizes and dtypes that may differ."""
        content = {"sizes": self.sizes, "dtypes": self.dtypes}
        return {name: text for name, text in content.items() if name not in self.common}

    @property
    def key(self) -> Key:
        """What is equal on ranks that run the same program: `what` and `place`."""
        return self.what, self.place

    def __str__(self) -> str:
        return f"{self.op} #{self.seq} {self.sizes} of group {self.group!r}{at_text(self.line)}"


class Message(Frozen):
    """A send or receive that this rank posted."""

    op: Literal["send", "recv"]
    peer: Rank
    """Global rank."""
    number: Number
    """Its number among the messages of this op with this peer, from 1."""
    tag: int = 0
    """What gloo takes messages by."""
    number_of_tag: Number = 0
    """Its number among those with this tag, from 1; 0 where it is not known."""
    content: dict[str, str] = {}
    """Elements and dtypes, equal on both ends."""
    age_s: Seconds = 0.0
    stack: tuple[UserLine, ...] = ()
    """The user's frames, outermost first."""
    is_queued: bool = False
    """On a GPU, behind one that is in flight with this peer: it has not begun."""


class PointToPoint(Frozen):
    """A send or receive in flight."""

    op: Literal["send", "recv"]
    peer: Rank
    """Global rank."""
    line: UserLine | None = None
    number: Number = 0
    """That of the message, where it was recorded."""
    tag: int = 0
    """That of the message, which gloo takes messages by."""
    number_of_tag: Number = 0
    """Its number among those with this tag; 0 where it is not known."""

    def __str__(self) -> str:
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{self.op} {_TOWARDS[self.op]} rank {self.peer}{tag}{at_text(self.line)}"


_TOWARDS = {"send": "to", "recv": "from"}


class RankState(Frozen):
    """State of a rank, its answer to an `ask` event."""

    rank: Rank
    activity: str
    since_s: Seconds
    position: Position | None = None
    compile_id: str = ""
    reason: str = ""
    waits_at: Position | None = None
    """Position at which it has compiled and waits for the other ranks."""
    in_dynamo: bool = False
    blocked: bool = False
    """The main thread is in a collective or waits for one."""
    stack: tuple[UserLine, ...] = ()
    """The user's frames of the main thread, innermost last."""
    issued: tuple[Issued, ...] = ()
    """The last collectives of every group, oldest first."""
    calling: str = ""
    """Group of the collective call in which the main thread is, whether issued or not."""
    messages: tuple[Message, ...] = ()
    """The last sends and receives, oldest first."""
    p2p: PointToPoint | None = None
    """The send or receive in which the rank waits."""
    calls: dict[str, Number] = {}
    """Region -> its calls so far."""
    groups: tuple[str, ...] = ()
    """`name description` of every process group this rank is in."""
    members: dict[str, tuple[Rank, ...]] = {}
    """The ranks of each group."""
    cpu_s: Seconds = 0.0
    """CPU time of its process; where it uses a GPU, which may compute meanwhile, the time that passes."""
    ended: str = ""
    """Why this rank has left: FINISHED, or an exception. Empty before that."""
    host: str = ""
    """Name of its host."""
    phase: str = ""
    """The phase of the gate that the rank has finished; it waits for the other ranks before the next one."""

    @property
    def line(self) -> UserLine | None:
        """Innermost frame of the user's code."""
        return last(self.stack)

    @property
    def program_line(self) -> UserLine | None:
        """The same outside of installed packages, if there is one."""
        return of_program(self.stack) or self.line

    @property
    def compiles(self) -> bool:
        """True while torch compiles, autotunes or records a CUDA graph."""
        return self.in_dynamo or self.activity in COMPILES

    @property
    def in_flight(self) -> tuple[Issued, ...]:
        """Collectives that this rank has issued and that have not ended."""
        return tuple(issued for issued in self.issued if not issued.is_done)

    @property
    def blocked_in(self) -> Issued | None:
        """The oldest collective in flight."""
        return max(self.in_flight, key=lambda issued: issued.age_s, default=None)

    @property
    def newest(self) -> Issued | None:
        """The collective it issued last."""
        return min(reversed(self.issued), key=lambda issued: issued.age_s, default=None)  # they are sorted by group

    @property
    def latest(self) -> Issued | None:
        """The collective it is in, or else the one it issued last."""
        return self.blocked_in or self.newest

    @property
    def before_latest(self) -> Issued | None:
        """The collective before `latest` in the same group; None when it is not known."""
        latest = self.latest
        if latest is None:
            return None
        return first(one for one in self.issued_in(latest.group) if one.seq == latest.seq - 1)

    @property
    def how_it_ended(self) -> str:
        """How this rank has left, as the end of `rank 1 ...`."""
        return f"has finished phase {self.phase}" if self.phase else f"has left: {self.ended}"

    @property
    def waits(self) -> bool:
        """True for a rank that waits for other ranks."""
        return self.blocked or any((self.waits_at, self.p2p, self.in_flight))

    @property
    def wait_line(self) -> UserLine | None:
        """The line that issued what it waits in; on a GPU the program has moved on."""
        issued = self.blocked_in if self.waits_at is None else None
        return (issued and issued.line) or self.line

    @property
    def waits_with(self) -> set[int]:
        """Its peer, and all ranks of the groups of its collectives, in flight or about to be issued."""
        names = [issued.group for issued in self.in_flight]
        if self.p2p is None:
            return set[int]().union(*(self.members.get(name, ()) for name in [*names, self.calling]))
        return {self.p2p.peer}.union(*(self.members.get(name, ()) for name in names))

    def issued_in(self, group: str) -> tuple[Issued, ...]:
        """Its last collectives of a group, oldest first."""
        return tuple(issued for issued in self.issued if issued.group == group)

    def has_issued(self, wanted: Issued) -> bool:
        """True when the rank has issued that collective."""
        return wanted.id in [issued.id for issued in self.issued]

    def last_number(self, group: str) -> int:
        """Number of the last collective it issued in a group, 0 for none."""
        return max((issued.seq for issued in self.issued_in(group)), default=0)

    def can_still_join(self, group: str, number: int) -> bool:
        """True for a rank of the group that has not issued the collective of that number yet."""
        return group in self.groups and self.last_number(group) < number
