"""Records of one log, in order -> which compiles cannot be relied on, and which are missing.

A compile with a damaged or missing record was not observed: comparing what is left of it would show a difference that
the job does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpcompile.evidence.compiles.contradictions import BEFORE_THE_END, Damage, Flaw, Story, is_earlier, missing_records
from tpcompile.evidence.compiles.events import TraceEvent, compile_id_of
from tpcompile.evidence.iterables import first
from tpcompile.evidence.logs.compiled import LoggedCompile
from tpcompile.evidence.records import UserLine


class Soundness:
    """Follows the compiles of one log, and notes in each what is wrong with it."""

    def __init__(self, compiles: Sequence[LoggedCompile]) -> None:
        self._compiles = compiles
        self._stories: dict[int, Story] = {}
        """Compiles that have not ended, by number."""
        self._ended: set[int] = set()
        self._in_progress: int | None = None
        """torch compiles one frame at a time."""
        self._time = b""
        """Time of the latest record of any compile."""
        self._latest: dict[str | None, int] = {}
        """Compile id -> number of the last compile with that id."""
        self._damaged_ids: set[str | None] = set()
        """Ids in damaged records of compiles that had no sound record yet."""
        self._strays: dict[int, set[str]] = {}
        """Compile -> events that came after its end."""
        self._last_of_frame: dict[int, int] = {}
        """Frame -> number of its last compile, as torch counts them."""
        self._num_frames = 0
        self.missing: set[str] = set()
        """Ranges of frames of which the log has no compile, though torch numbers frames without gaps."""

    def begin(self, number: int, time: bytes) -> None:
        """Note a compile whose first record, of that time, was read."""
        compile_id = self._compiles[number].compile_id
        before = self._latest.get(compile_id)
        is_unfinished = before in self._stories
        # torch.compiler.reset() gives ids again, but only later
        is_written_again = before is not None and is_earlier(time, self._time)
        if is_unfinished or is_written_again:
            self._blame(before, Damage(Flaw.BEGINS_TWICE))
            self._blame(number, Damage(Flaw.BEGINS_TWICE))
        if compile_id in self._damaged_ids:
            self._damaged_ids.remove(compile_id)
            self._blame(number, Damage(Flaw.DAMAGED))
        self._count(number, compile_id)
        self._stories[number] = Story(compile_id)
        self._in_progress = self._latest[compile_id] = number

    def _count(self, number: int, compile_id: str) -> None:
        """Note gaps between the ids: torch counts frames, and the compiles of each, one by one."""
        *_, frame_text, turn_text = compile_id.split("/")
        if not (frame_text.isdecimal() and turn_text.isdecimal()):
            return  # compiled autograd has compiles without a frame
        frame, turn = int(frame_text), int(turn_text)
        if turn == 0 and frame in self._last_of_frame:  # torch.compiler.reset() begins again
            self._last_of_frame, self._num_frames = {}, 0
        if frame > self._num_frames:
            self.missing.add(f"{self._num_frames}-{frame - 1}")
        self._num_frames = max(self._num_frames, frame + 1)
        if turn != self._last_of_frame.get(frame, -1) + 1:
            self._blame(number, Damage(Flaw.AFTER_A_GAP))
        self._last_of_frame[frame] = turn

    def take(self, number: int, item: TraceEvent, time: bytes, stack: Sequence[UserLine] | None) -> None:
        """Note a sound record of a compile; `stack` is that of a start."""
        if self._in_progress not in (None, number):
            self._blame(number, Damage(Flaw.MIXED))
            self._blame(self._in_progress, Damage(Flaw.MIXED))
        is_late = is_earlier(time, self._time)
        self._time = self._time if is_late else time
        story = self._stories.get(number)
        if story is None:
            flaw = first(missing_records(self._compiles[number].names))
            self._blame(number, Damage(Flaw.OUT_OF_ORDER, item.name) if is_late else None)
            self._blame(number, None if flaw is None else Damage(flaw))
            return
        if stack is not None:
            story.stack = stack
        story.take(item, time)
        self._blame(number, story.damage)
        if item.name == "compilation_metrics":
            del self._stories[number]
            self._ended.add(number)
            self._in_progress = None

    def is_stray(self, number: int, name: str) -> bool:
        """True for an event of a compile that has ended and no longer logs it.

        torch.export captures a graph under an id that was used before, without a start and an end; any other stray
        record has a damaged id.
        """
        is_stray = number in self._ended and name in BEFORE_THE_END
        if is_stray:
            names = self._strays.setdefault(number, set())
            names.add(name)
        return is_stray

    def finish(self) -> None:
        """Note the end of the log: only the compile in progress may have been cut off there."""
        for number, story in self._stories.items():
            story.end_of_log(is_in_progress=number == self._in_progress)
            self._blame(number, story.damage)
        for number, names in self._strays.items():
            if "dynamo_output_graph" not in names:
                self._blame(number, Damage(Flaw.AFTER_ITS_END, min(names)))

    def damaged(self, metadata: Mapping[str, Any]) -> None:
        """Note a damaged record: it may be of the compile in progress, and of the one that it names."""
        named = compile_id_of(metadata)
        number = self._latest.get(named)
        self._blame(self._in_progress, Damage(Flaw.DAMAGED))
        self._blame(number, Damage(Flaw.DAMAGED))
        if number not in self._stories:
            self._damaged_ids.add(named)

    def _blame(self, number: int | None, damage: Damage | None) -> None:
        """Note what is wrong with a compile; of several flaws the first is kept."""
        if number is not None:
            compile_ = self._compiles[number]
            compile_.damage = compile_.damage or damage
