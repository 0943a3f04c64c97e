"""What happens to a rank, and what its protocol wants done: plain data between the pure part and the effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpcompile.evidence.records import Check, Frozen, UserLine
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.marks import Counted
from tpcompile.sentinel.messages import Announcement, CompilePost, Position, RankState
from tpcompile.sentinel.variants import Ran


class Alarm(Frozen):
    """Something is wrong, or may be: what all ranks settle together."""

    key: str
    position: Position | None = None
    """The compile to compare, None when it is not about one."""
    problem: Check | None = None
    """What is already known to be wrong."""
    gone: tuple[int, ...] = ()
    """Ranks that cannot answer."""


@dataclass(frozen=True)
class Absence:
    """What is known of the process of a rank that did not answer."""

    how: str
    """`dead`, `stopped`, or anything else for a process that may live."""
    stack: tuple[UserLine, ...] = ()
    """The user's frames it died in, outermost first, when it left them."""
    aborted: bool = False

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
    """This rank has compiled, and the code has not run yet."""

    position: Position
    post: CompilePost
    may_wait: bool
    """False for a compile that failed: an exception is on its way, or the frame runs eager from here on."""


@dataclass(frozen=True)
class Posted:
    """This rank's post is in the store."""

    position: Position
    is_last: bool
    is_equal: bool


@dataclass(frozen=True)
class WentPast:
    """This rank is past a position at which another one compiles."""

    found: Announcement


@dataclass(frozen=True)
class StillCompiling:
    """A compile that another rank went past has taken a while."""

    position: Position
    theirs: RankState


@dataclass(frozen=True)
class Settled:
    """The ranks have a verdict, and the policy did not end the process."""

    position: Position | None
    is_red: bool


@dataclass(frozen=True)
class Failed:
    """The sentinel itself failed on this rank, or lost the store."""

    why: str


@dataclass(frozen=True)
class Leaving:
    """The watched block ends on this rank."""


@dataclass(frozen=True)
class Tick:
    """The timer looks at this rank."""

    now_s: float


@dataclass(frozen=True)
class Looked:
    """Whether the main thread is in a collective that does not end."""

    now_s: float
    is_stuck: bool


@dataclass(frozen=True)
class Answers:
    """What the ranks said when asked; `absent` are those that did not."""

    now_s: float
    states: Mapping[int, RankState]
    absent: Mapping[int, Absence]
    other_domains: Mapping[int, RankState] = field(default_factory=dict)
    """Ranks of other domains that wait, too, as they told perhaps a while ago: what they issued stays true."""


@dataclass(frozen=True)
class Compared:
    """What ran here, and on ranks beside this one, as far as they have told."""

    ran: Mapping[int, Mapping[str, Ran]]
    counted: Mapping[int, Mapping[str, Counted]]


# Events of other ranks, from the log.


@dataclass(frozen=True)
class PeerCompiled:
    """A rank begins to compile, the first one there."""

    found: Announcement


@dataclass(frozen=True)
class PeerPassed:
    """A rank went past a position at which some rank compiles."""

    position: Position
    theirs: RankState


@dataclass(frozen=True)
class Decided:
    """All ranks agree there, or have settled that they go on."""

    position: Position


@dataclass(frozen=True)
class Asked:
    """A rank asks what everybody does."""

    rank: int
    number: int


@dataclass(frozen=True)
class PeerLeft:
    """A rank closed its sentinel."""

    state: RankState


@dataclass(frozen=True)
class PeerFailed:
    """A rank watches no longer."""

    why: str


@dataclass(frozen=True)
class AlarmHeard:
    """A rank raised an alarm."""

    alarm: Alarm


Event = (
    CompileStarted | CompileEnded | Posted | WentPast | StillCompiling | Settled | Failed | Leaving | Tick | Looked
    | Answers | Compared | PeerCompiled | PeerPassed | Decided | Asked | PeerLeft | PeerFailed | AlarmHeard
)  # fmt: skip

# Actions.


@dataclass(frozen=True)
class Announce:
    """Tell the others that this rank compiles, unless one has told it of that position."""

    found: Announcement


@dataclass(frozen=True)
class Post:
    """Publish what was compiled; `Posted` follows."""

    position: Position
    post: CompilePost


@dataclass(frozen=True)
class Wait:
    """Hold the compiling thread until the position is released."""

    position: Position


@dataclass(frozen=True)
class Release:
    """Wake whoever waits."""


@dataclass(frozen=True)
class DecideEqual:
    """Tell everybody that the ranks agree there."""

    position: Position


@dataclass(frozen=True)
class TellPassed:
    """Tell everybody that this rank went past."""

    position: Position


@dataclass(frozen=True)
class RaiseAlarm:
    """Let all ranks settle what was compiled there."""

    position: Position


@dataclass(frozen=True)
class RaiseOneRank:
    """The same, knowing that another rank went past it."""

    position: Position
    theirs: RankState


@dataclass(frozen=True)
class RaiseFinding:
    """The ranks cannot go on."""

    finding: Finding


@dataclass(frozen=True)
class Later:
    """Hand the event in again after a time."""

    after_s: float
    event: StillCompiling


@dataclass(frozen=True)
class Answer:
    """Tell what this rank does."""

    number: int


@dataclass(frozen=True)
class Look:
    """See whether the main thread is stuck; `Looked` follows."""


@dataclass(frozen=True)
class Compare:
    """Tell what ran here, and read what the next rank has told; `Compared` follows where there is news."""


@dataclass(frozen=True)
class Ask:
    """Ask what everybody does; `Answers` follows."""

    expected: tuple[int, ...]


@dataclass(frozen=True)
class Say:
    """Write a warning into this rank's log."""

    text: str


@dataclass(frozen=True)
class Settle:
    """Agree on a verdict with the ranks that are present; `Settled` follows where the job goes on."""

    alarm: Alarm
    present: tuple[int, ...]


@dataclass(frozen=True)
class StopWatching:
    """Say why, on this rank and to the others."""

    why: str


Action = (
    Announce | Post | Wait | Release | DecideEqual | TellPassed | RaiseAlarm | RaiseOneRank | RaiseFinding | Later
    | Answer | Look | Compare | Ask | Say | Settle | StopWatching
)  # fmt: skip
