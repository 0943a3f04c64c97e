"""Events of a rank as text -> a stream. Tokens, with the lines of the stack outermost first:

`i5` iteration, `a10` all_reduce of all ranks, `s10` of the group `some`, `t10` of the role `tp`, `c8=f` call of f,
`>1@10` send to rank 1, `<0@20` receive; `a5.10` issued in the function called at line 5, `a10:8x4` sizes, `c8=f:1`
variant 1, `a8.40@f2` issued in call 2 of f, `a10*` not done, `(i5 a10)x3` three times.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.timeline.stream import Event, How, Kind, Stream

_REPEATED = re.compile(r"\(([^()]*)\)x(\d+)")
_TOKEN = re.compile(
    r"(?P<kind>[iastc<>e])(?:(?P<peer>\d+)@)?(?P<lines>[\d.]*)(?:=(?P<name>\w+))?(?::(?P<content>\w+))?"
    r"(?:@(?P<region>[a-z]+)(?P<call>\d+))?(?P<undone>\*)?"
)
_GROUPS = {"a": "world", "s": "some", "t": "tp"}
_KINDS = {"i": Kind.ITERATION, "c": Kind.CALL, ">": Kind.SEND, "<": Kind.RECEIVE, "e": Kind.END}


def stream(
    rank: int,
    text: str,
    groups: Mapping[str, tuple[int, ...]],
    how: How | None = None,
    first: Mapping[str, int] | None = None,
) -> Stream:
    """The stream of a rank; with `first`, the numbers of its first events by sequence, it is cut at the front."""
    while _REPEATED.search(text):
        text = _REPEATED.sub(lambda found: " ".join([found[1]] * int(found[2])), text)
    numbers = Counter({name: number - 1 for name, number in (first or {}).items()})
    events = [_event(token, numbers) for token in text.split()]
    waits = bool(events) and not events[-1].is_done
    own = {name: ranks for name, ranks in groups.items() if rank in ranks}
    ends = how or (How.WAITING if waits else How.RUNNING)
    return Stream(rank=rank, events=tuple(events), is_whole=first is None, how=ends, groups=own)


def _event(token: str, numbers: Counter[str]) -> Event:
    found = _TOKEN.fullmatch(token)
    assert found, token
    kind = _KINDS.get(found["kind"], Kind.COLLECTIVE)
    group = _GROUPS.get(found["kind"], "")
    counted = group or f"{found['kind']}{found['peer'] or found['name'] or ''}"
    numbers[counted] += 1
    lines = [int(line) for line in found["lines"].split(".") if line]
    functions = ["main", *(f"called_at_{line}" for line in lines)]
    stack = [UserLine(file="/home/me/train.py", line=line, function=functions[at]) for at, line in enumerate(lines)]
    return Event(
        kind=kind,
        name=found["name"] or ("all_reduce" if group else ""),
        group=group,
        content={"what": found["content"]} if found["content"] else {},
        peer=int(found["peer"]) if found["peer"] else None,
        number=numbers[counted],
        region=found["region"] or "",
        call=int(found["call"] or 0),
        stack=tuple(stack),
        is_done=not found["undone"],
    )
