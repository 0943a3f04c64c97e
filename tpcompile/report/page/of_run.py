"""A run directory -> evidence for a page. Records of equal content are kept once, so that 1,024 ranks fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpcompile.errors import ConfigError
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.verdict import fetch_of
from tpcompile.evidence.records import RankDigest, RankRecord, Verdict
from tpcompile.evidence.records.reader import read_json, read_object, read_record, validated
from tpcompile.evidence.rundir import RunDir
from tpcompile.evidence.timeline.stream import Kind, TimedStream
from tpcompile.report.page.evidence import Event, EventKind, Evidence, Manifest, in_order

_FACTS = ("started", "host", "device", "torch", "python", "command")
_KINDS: dict[Kind, EventKind] = {
    Kind.ITERATION: "iteration", Kind.CALL: "calls", Kind.COMPILE: "compile", Kind.COLLECTIVE: "collective",
    Kind.SEND: "message", Kind.RECEIVE: "message", Kind.BREAK: "break", Kind.END: "end",
}  # fmt: skip
_ALARM, _LATE_S = "alarm", 5.0
"""What each rank notes when it hears of an alarm, and how much later that is on a rank that is only busy."""


def evidence_of_run(run_dir: RunDir, verdict: Verdict) -> Evidence:
    """All that a run directory holds, judged as `verdict`. Raises ConfigError on a damaged file."""
    run = run_dir.read_run()
    records = _Records(run_dir)
    digests = records.digests
    timed = timed_events(run_dir)
    events = timed or {digest.rank: in_order(digest) for digest in digests}
    facts = {name: str(run[name]) for name in _FACTS if run.get(name)}
    kind = str(run.get("kind", "gate"))
    return Evidence(
        verdict=verdict, command={"captured": "check"}.get(kind, kind), name=run_dir.path.name, digests=digests,
        fetch=fetch_of(records.by_rank), events=events, has_clock=bool(timed), manifests=_manifests(run_dir),
        facts=facts, notes=tuple(records.notes),
    )  # fmt: skip


class _Records:
    def __init__(self, run_dir: RunDir) -> None:
        self.digests: list[RankDigest] = []
        self.notes: list[str] = []
        self.by_rank: dict[int, RankRecord] = {}
        self._kept: dict[str, tuple[RankRecord, RankDigest]] = {}
        for path in run_dir.rank_files("record.json"):
            try:
                self._take(path)
            except (ConfigError, OSError) as error:  # the verdict is there: a page of what can be read
                self.notes.append(str(error))

    def _take(self, path: Path) -> None:
        data = read_object(path)
        key = _content(data)
        if key not in self._kept:
            record = validated(RankRecord, data, path)
            self._kept[key] = record, digest_rank(record)
        rank, coordinate = data.get("rank"), data.get("coordinate")
        if not isinstance(rank, int) or not isinstance(coordinate, int):
            raise ConfigError(f"{path} is damaged: its rank is no number")
        self.by_rank[rank], digest = self._kept[key]
        self.digests.append(digest.changed(rank=rank, coordinate=coordinate))


def _content(data: dict[str, Any]) -> str:
    """Equal for records that differ in their rank, and in measured and removed text, only."""
    compiles = data.get("compiles")
    if isinstance(compiles, list):
        compiles = [{**one, "normalised": None} if isinstance(one, dict) else one for one in compiles]
    same = {
        name: value for name, value in data.items() if name not in ("rank", "coordinate", "facts", "places", "host")
    }
    return hashlib.sha256(json.dumps({**same, "compiles": compiles}, sort_keys=True).encode()).hexdigest()


def _manifests(run_dir: RunDir) -> dict[int, Manifest]:
    found: dict[int, Manifest] = {}
    known: dict[str, Manifest] = {}
    for path in run_dir.rank_files("manifest.json"):
        try:
            key = hashlib.sha256(path.read_bytes()).hexdigest()
            if key not in known:
                known[key] = read_record(Manifest, path)
        except (ConfigError, OSError):  # fusion is beside the verdict, not part of it
            continue
        found[int(path.parent.name.partition("_")[2])] = known[key]
    return found


def timed_events(run_dir: RunDir) -> dict[int, list[Event]]:
    """What a sentinel kept of each rank, in Unix times: its compiles, and its collectives and messages."""
    found: dict[int, list[Event]] = {}
    for path in run_dir.rank_files("timeline.json"):
        rank = int(path.parent.name.partition("_")[2])
        found.setdefault(rank, []).extend(_noted(read_json(path)))
    for path in sorted((run_dir.path / "streams").glob("rank_*.json")):
        timed = read_record(TimedStream, path)
        found.setdefault(timed.stream.rank, []).extend(_done(timed))
    return _on_one_clock(found)


def _on_one_clock(found: Mapping[int, list[Event]]) -> dict[int, list[Event]]:
    """The same by the clock of one rank: all hear of an alarm at once, and note it at the times of their clocks."""
    heard: dict[int, float] = {}
    for rank, events in sorted(found.items()):
        alarms = [event.start for event in events if event.label == _ALARM]
        if alarms:
            heard[rank] = alarms[0]
    right_s = next(iter(heard.values()), 0.0)
    moved: dict[int, list[Event]] = {}
    for rank, events in found.items():
        ahead_s = heard.get(rank, right_s) - right_s
        is_wrong = abs(ahead_s) > _LATE_S
        if is_wrong:
            events = [replace(one, start=one.start - ahead_s, end=one.end - ahead_s) for one in events]
        moved[rank] = events
    return moved


def _noted(entries: object) -> Iterator[Event]:
    """Entries of a `timeline.json`: compiles, the alarm and the verdict."""
    began: dict[str, float] = {}
    for entry in entries if isinstance(entries, list) else []:
        if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], int | float)):
            continue
        at, what, compile_id = float(entry[0]), str(entry[1]), str(entry[2])
        if what == "compile starts":
            began[compile_id] = at
        elif what == "compile ends":
            start = began.pop(compile_id, None)
            if start is not None:
                yield Event("compile" if compile_id.endswith("/0") else "recompile", compile_id, start, at)
        else:
            yield Event("end", what, at, at)


def _done(timed: TimedStream) -> Iterator[Event]:
    """What a rank did, each until the next began; what it waits in has no end."""
    events, times = timed.stream.events, timed.times
    for event, start, following in zip(events, times, [*times[1:], *times[-1:]], strict=False):
        end = following if event.is_done else timed.until
        number = f" #{event.number}" if event.number else ""
        of_group = f" of {event.group}" if event.group else ""
        peer = f" {'to' if event.kind == Kind.SEND else 'from'} rank {event.peer}" if event.peer is not None else ""
        content = [f"{key} {value}" for key, value in {**event.content, **event.own}.items()]
        detail = ", ".join([*content, *([] if event.is_done else ["not done"])])
        line = event.stack[-1] if event.stack else None
        label = f"{event.name or event.kind.value}{number}{of_group}{peer}"
        yield Event(_KINDS[event.kind], label, start, max(start, end), detail, line)
