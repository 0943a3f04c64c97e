"""Events of a rank, and the actions of its protocol: plain data between the pure protocol and the side effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpcompile.evidence.records import Check, Frozen, UserLine
from tpcompile.evidence.records.bounds import Rank
from tpcompile.sentinel.agreement import Links, Span, Value
from tpcompile.sentinel.counter_samples import Counted
from tpcompile.sentinel.deadlock import Seen
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import Announcement, CompilePost, Position, RankState
from tpcompile.sentinel.variants import Ran


class Alarm(Frozen):
    """A problem, or a possible one, that all ranks settle together."""

    key: str
    position: Position | None = None
    """The compile to compare; None for a problem that is not about a compile."""
    problem: Check | None = None
    """The failed check, where it is known already."""
    gone: tuple[Rank, ...] = ()
    """Ranks that cannot answer."""
    num_issued: int = 0
    """Number of collectives that the rank had issued before a compile without any."""
    is_interrupted: bool = False
    """Somebody ends the job: what a rank waited for may only have been slow."""


@dataclass(frozen=True)
class Absence:
    """What is known about the process of a rank that did not answer."""

    how: str
    """`dead`, `stopped`, or any other value for a process that may be alive."""
    stack: tuple[UserLine, ...] = ()
    """The user's frames in which it died, outermost first; empty when it left no stack."""
    aborted: bool = False
    host: str = ""
    """Name of its host."""

    @property
    def may_live(self) -> bool:
        """True unless it is known that the process cannot answer."""
        return self.how not in ("dead", "stopped")


# Events of this rank.


@dataclass(frozen=True)
class CompileStarted:
    """This rank begins to compile."""

    found: Announcement


@dataclass(frozen=True)
class CompileEnded:
    """This rank has compiled; the code has not run yet."""

    position: Position
    post: CompilePost
    may_wait: bool
    """False for a failed compile: an exception follows, or the frame runs eager from now on."""


@dataclass(frozen=True)
class Posted:
    """This rank's post is in the store."""

    position: Position
    is_last: bool
    is_equal: bool


@dataclass(frozen=True)
class WentPast:
    """This rank has passed a position at which a different rank compiles."""

    found: Announcement


@dataclass(frozen=True)
class StillCompiling:
    """A compile that a different rank passed has not ended after some time."""

    position: Position
    theirs: RankState


@dataclass(frozen=True)
class Settled:
    """The ranks have a verdict, and the policy did not end the process."""

    position: Position | None
    is_red: bool


@dataclass(frozen=True)
class Failed:
    """The sentinel itself failed on this rank, or the store cannot be reached."""

    why: str


@dataclass(frozen=True)
class Leaving:
    """The watched block ends on this rank."""


@dataclass(frozen=True)
class Tick:
    """The timer ticks."""

    now_s: float


@dataclass(frozen=True)
class Looked:
    """True while the main thread is stuck in a collective."""

    now_s: float
    is_stuck: bool


@dataclass(frozen=True)
class Answers:
    """States of the ranks that answered; `absent` are those that did not answer."""

    now_s: float
    states: Mapping[int, RankState]
    absent: Mapping[int, Absence]
    other_domains: Mapping[int, Seen] = field(default_factory=dict)
    """Ranks of other domains that wait. Their states may be old; the collectives they issued remain valid."""
    unix_s: float = 0.0
    """The same time by the clock of this host."""


@dataclass(frozen=True)
class Compared:
    """What ran on this rank, and on other ranks as far as they have published it."""

    ran: Mapping[int, Mapping[str, Ran]]
    counted: Mapping[int, Mapping[str, Counted]]
    links: Mapping[int, Links] = field(default_factory=dict)
    is_last: bool = False
    """This rank leaves: nothing is compared after this."""


@dataclass(frozen=True)
class Recalled:
    """Values of the ranks that answered; of those that have left, how many they had."""

    span: Span
    values: Mapping[int, Mapping[int, Value]]
    nums: Mapping[int, int]


# Events of other ranks, from the log.


@dataclass(frozen=True)
class PeerCompiled:
    """A rank begins to compile, the first one at this position."""

    found: Announcement


@dataclass(frozen=True)
class PeerPassed:
    """A rank has passed a position at which a different rank compiles."""

    position: Position
    theirs: RankState


@dataclass(frozen=True)
class Decided:
    """All ranks agree on a position, or have settled that they continue."""

    position: Position


@dataclass(frozen=True)
class Asked:
    """A rank asks for the state of all ranks."""

    rank: int
    number: int


@dataclass(frozen=True)
class RecallAsked:
    """A rank asks for the values of all ranks in a span."""

    number: int
    span: Span


@dataclass(frozen=True)
class PeersLeft:
    """Ranks closed their sentinels; a state may be read when it is asked for."""

    states: Mapping[int, RankState]


@dataclass(frozen=True)
class PeerFailed:
    """A rank has stopped watching."""

    why: str


@dataclass(frozen=True)
class AlarmHeard:
    """A rank raised an alarm."""

    alarm: Alarm


Event = (
    CompileStarted | CompileEnded | Posted | WentPast | StillCompiling | Settled | Failed | Leaving | Tick | Looked
    | Answers | Compared | Recalled | RecallAsked | PeerCompiled | PeerPassed | Decided | Asked | PeersLeft
    | PeerFailed | AlarmHeard
)  # fmt: skip

# Actions.


@dataclass(frozen=True)
class Announce:
    """Announce that this rank compiles, unless a rank has announced that position."""

    found: Announcement


@dataclass(frozen=True)
class Post:
    """Publish what was compiled; `Posted` follows."""

    position: Position
    post: CompilePost


@dataclass(frozen=True)
class Wait:
    """Block the compiling thread until the position is released."""

    position: Position


@dataclass(frozen=True)
class Release:
    """Wake the waiting threads of this rank."""


@dataclass(frozen=True)
class DecideEqual:
    """Publish that the ranks agree on a position."""

    position: Position


@dataclass(frozen=True)
class TellPassed:
    """Publish that this rank has passed a position."""

    position: Position


@dataclass(frozen=True)
class RaiseAlarm:
    """Let all ranks settle what was compiled at a position."""

    position: Position


@dataclass(frozen=True)
class RaiseOneRank:
    """Let all ranks settle what was compiled at a position that a different rank passed."""

    position: Position
    theirs: RankState


@dataclass(frozen=True)
class RaiseFinding:
    """Raise the alarm that the ranks cannot continue."""

    finding: Finding


@dataclass(frozen=True)
class Later:
    """Process the event after a delay."""

    after_s: float
    event: StillCompiling


@dataclass(frozen=True)
class Answer:
    """Publish the state of this rank."""

    number: int


@dataclass(frozen=True)
class Look:
    """Check whether the main thread is stuck; `Looked` follows."""


@dataclass(frozen=True)
class Compare:
    """Publish what ran on this rank and read it of the next rank; `Compared` follows where something changed."""


@dataclass(frozen=True)
class Recall:
    """Ask for the values of all ranks in a span; `Recalled` follows."""

    span: Span
    waits: bool
    """This rank leaves and asks once: it gives the others time to come to their end."""


@dataclass(frozen=True)
class TellValues:
    """Publish the values of this rank in a span."""

    number: int
    span: Span


@dataclass(frozen=True)
class Ask:
    """Ask for the state of all ranks; `Answers` follows."""

    expected: tuple[int, ...]


@dataclass(frozen=True)
class Say:
    """Log what this rank waits for. No warning: with a cold cache on one rank, its peers wait, which is no fault."""

    text: str


@dataclass(frozen=True)
class Settle:
    """Agree on a verdict with the ranks that are present; `Settled` follows if the job continues."""

    alarm: Alarm
    present: tuple[int, ...]


@dataclass(frozen=True)
class StopWatching:
    """Log the reason on this rank and publish it to the other ranks."""

    why: str


Action = (
    Announce | Post | Wait | Release | DecideEqual | TellPassed | RaiseAlarm | RaiseOneRank | RaiseFinding | Later
    | Answer | Look | Compare | Recall | TellValues | Ask | Say | Settle | StopWatching
)  # fmt: skip
