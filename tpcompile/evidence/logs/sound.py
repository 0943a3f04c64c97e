"""Records of one log, in order -> which compiles cannot be relied on, and which are missing.

A compile with a damaged or missing record was not observed: comparing what is left of it would show a difference that
the job does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpcompile.evidence.compiles.story import Story, is_before_the_end, is_earlier, missing_records
from tpcompile.evidence.compiles.trace import TraceEvent, compile_id_of
from tpcompile.evidence.iterables import first
from tpcompile.evidence.logs.compiled import LoggedCompile
from tpcompile.evidence.records import UserLine

_DAMAGED = "one of its records is damaged"
_TWICE = "it begins twice"
_AMONG = "a record of a different compile is among its records"


class Soundness:
    """Follows the compiles of one log, and notes in each what is wrong with it."""

    def __init__(self, compiles: Sequence[LoggedCompile]) -> None:
        self._compiles = compiles
        self._stories: dict[int, Story] = {}
        """By number, of the compiles that have not ended."""
        self._ended: set[int] = set()
        self._open: int | None = None
        """The compile in progress: torch compiles one frame at a time."""
        self._time = b""
        """The latest of the records of all compiles."""
        self._latest: dict[str | None, int] = {}
        """By compile id, the number of its last compile."""
        self._damaged_ids: set[str | None] = set()
        """Ids in damaged records of compiles that had no sound record yet."""
        self._strays: dict[int, set[str]] = {}
        """By compile, events that came after its end."""
        self._ids = _Ids()

    @property
    def missing(self) -> frozenset[str]:
        """Ranges of frames of which the log has no compile, though torch numbers frames without gaps."""
        return frozenset(self._ids.missing)

    def begin(self, number: int, time: bytes) -> None:
        """Note a compile whose first record, of that time, was read."""
        compile_id = self._compiles[number].compile_id
        before = self._latest.get(compile_id)
        is_unfinished = before in self._stories
        has_id_again = compile_id in self._latest
        is_written_again = has_id_again and is_earlier(
            time, self._time
        )  # torch.compiler.reset() gives ids again, later
        if is_unfinished or is_written_again:
            self._blame(before, _TWICE)
            self._blame(number, _TWICE)
        if compile_id in self._damaged_ids:
            self._damaged_ids.remove(compile_id)
            self._blame(number, _DAMAGED)
        self._blame(number, self._ids.begin(compile_id))
        self._stories[number] = Story(compile_id)
        self._open = self._latest[compile_id] = number

    def take(self, number: int, item: TraceEvent, time: bytes, stack: Sequence[UserLine] | None) -> None:
        """Note a sound record of a compile; `stack` is that of a start."""
        if self._open not in (None, number):
            self._blame(number, _AMONG)
            self._blame(self._open, _AMONG)
        is_late = is_earlier(time, self._time)
        self._time = self._time if is_late else time
        story = self._stories.get(number)
        if story is None:
            self._blame(number, f"{item.name} is out of order" if is_late else "")
            names = self._compiles[number].names
            self._blame(number, first(missing_records(names)) or "")
            return
        if stack is not None:
            story.stack = stack
        story.take(item, time)
        self._blame(number, story.contradiction)
        if story.is_ended:
            del self._stories[number]
            self._ended.add(number)
            self._open = None

    def is_stray(self, number: int, name: str) -> bool:
        """True for an event of a compile that has ended and no longer logs it.

        torch.export captures a graph under an id that was used before, without a start and an end; any other stray
        record has a damaged id.
        """
        is_ended = number in self._ended
        is_early_event = is_before_the_end(name)
        is_stray = is_ended and is_early_event
        if is_stray:
            names = self._strays.setdefault(number, set())
            names.add(name)
        return is_stray

    def finish(self) -> None:
        """Note the end of the log: only the compile in progress may have been cut off there."""
        for number, story in self._stories.items():
            if number == self._open:
                story.cut()
            else:
                story.contradicted("it has no end")
            self._blame(number, story.contradiction)
        for number, names in self._strays.items():
            if "dynamo_output_graph" not in names:
                self._blame(number, f"{min(names)} comes after its end")

    def damaged(self, metadata: Mapping[str, Any]) -> None:
        """Note a damaged record: it may be of the compile in progress, and of the one that it names."""
        named = compile_id_of(metadata)
        number = self._latest.get(named)
        self._blame(self._open, _DAMAGED)
        self._blame(number, _DAMAGED)
        if number not in self._stories:
            self._damaged_ids.add(named)

    def _blame(self, number: int | None, why: str) -> None:
        if number is None:
            return
        compile_ = self._compiles[number]
        compile_.damage = compile_.damage or why


class _Ids:
    """Compile ids in order of appearance -> those that are missing between them."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        """By frame, the number of its last compile."""
        self._num_frames = 0
        self.missing: set[str] = set()

    def begin(self, compile_id: str) -> str:
        """Note a new compile; why it cannot be relied on, where an earlier compile of its frame is missing."""
        *_, frame_text, number_text = compile_id.split("/")
        if not (frame_text.isdecimal() and number_text.isdecimal()):
            return ""  # compiled autograd has compiles without a frame
        frame, number = int(frame_text), int(number_text)
        if number == 0 and frame in self._last:  # torch.compiler.reset() begins again
            self._last, self._num_frames = {}, 0
        if frame > self._num_frames:
            self.missing.add(f"{self._num_frames}-{frame - 1}")
        self._num_frames = max(self._num_frames, frame + 1)
        expected = self._last.get(frame, -1) + 1
        self._last[frame] = number
        return "" if number == expected else "an earlier compile of its frame is missing"
