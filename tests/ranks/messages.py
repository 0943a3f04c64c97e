"""Every kind of message that ranks send through the store -> one that is valid."""

from __future__ import annotations

from typing import Any

from tpcompile.by_size.table import Cell, Row
from tpcompile.by_size.tuned import Brought, Settled
from tpcompile.evidence.records import (
    Check,
    CompileDigest,
    Divergence,
    DivergenceClass,
    Frozen,
    Item,
    Layer,
    RankDigest,
    RankGroup,
    Status,
    UserLine,
    Verdict,
)
from tpcompile.evidence.rundir import RankStatus
from tpcompile.fastpath.measured import Decision, ShapeClass
from tpcompile.fastpath.peers import _Refusal
from tpcompile.fastpath.selection import Processor
from tpcompile.fastpath.selection import Vote as FastPathVote
from tpcompile.gate.call_numbers import Calls
from tpcompile.gate.measurements import GateDigest
from tpcompile.preflight.facts import RankFacts, SetupDigest
from tpcompile.preflight.inputs import InputFacts
from tpcompile.preflight.locate import Form, Pieces
from tpcompile.preflight.locate import Question as PreflightQuestion
from tpcompile.profiles.agreement import Vote, _Brought, _Last, _Made, _Settled
from tpcompile.profiles.call_times import Measurement, Timings
from tpcompile.ranks.processes import Process as RankProcess
from tpcompile.ranks.recorded import _Question
from tpcompile.ranks.run_dir import _Choice
from tpcompile.sentinel import log_entries as entries
from tpcompile.sentinel.counter_samples import Counted
from tpcompile.sentinel.deadlock import Seen
from tpcompile.sentinel.events import Alarm
from tpcompile.sentinel.messages import Announcement, CompilePost, Issued, PointToPoint, Position, RankState
from tpcompile.sentinel.process import Process
from tpcompile.sentinel.variants import Ran

LINE = UserLine(file="train.py", line=3)
POSITION = Position(region="step train.py:3", call=2, index=0)
ISSUED = Issued(group="0 default_pg", seq=4, op="all_reduce", stack=(LINE,))
STATE = RankState(
    rank=1, activity="running", since_s=0.5, position=POSITION, issued=(ISSUED,), calls={POSITION.region: 2},
    p2p=PointToPoint(op="send", peer=0), groups=("0 default_pg",), members={"0 default_pg": (0, 1)},
)  # fmt: skip
CHECK = Check(status=Status.FAIL, expected="equal", observed="different", ranks=(1,))
ITEM = Item(about="x", fields={"value": "1"})
DIVERGENCE = Divergence(
    layer=Layer.GRAPH, cls=DivergenceClass.CONTENT, domain="tp 0-1", where="", title="differs",
    groups=(RankGroup(ranks=(0,)), RankGroup(ranks=(1,), item=ITEM)),
)  # fmt: skip
VERDICT = Verdict(
    status=Status.FAIL, exit_code=1, world_size=2, summary="", checks=(CHECK,), divergences=(DIVERGENCE,),
    domains={"tp": ((0,), (1,))},
)  # fmt: skip
COMPILED = CompileDigest(index=0, compile_id="0/0", phase="", frame="step train.py:3", layers=())
DIGEST = RankDigest(rank=1, domain="tp", coordinate=1, environment="0", compiles=(COMPILED,))
VOTE = Vote(program="mlp", profile="graphed")
CELL = Cell(
    gpu="NVIDIA H200", num_ranks=2, rows=(Row(up_to_bytes=4096, algorithm="one_shot"),), push_from_bytes=1 << 20
)
DECISION = Decision(path="silu_mul", shape=ShapeClass(tokens=1, widths=(8,), dtype="float32", tp=2), why="faster")

RECORDS: list[tuple[Any, Frozen]] = [
    (Process, Process(pid=1, host="here", black_box="0123456789abcdef")),
    (CompilePost, CompilePost(rank=1, frame="f", program="", collectives="", lowered="", num_collectives=1)),
    (Check, CHECK),
    (RankState, STATE),
    (Seen, Seen(state=STATE, number=1, domain=(0, 1))),
    (entries.AnyEntry, entries.CompileBegins(
        rank=1, announcement=Announcement(rank=1, position=POSITION, compile_id="0/0"))),
    (entries.AnyEntry, entries.Passed(rank=1, position=POSITION, state=STATE)),
    (entries.AnyEntry, entries.Settled(rank=1, position=POSITION)),
    (entries.AnyEntry, entries.Ask(rank=1, number=3)),
    (entries.AnyEntry, entries.Left(rank=1, ranks="0-1")),
    (entries.AnyEntry, entries.Raised(rank=1, alarm=Alarm(key="problem", position=POSITION, problem=CHECK, gone=(0,)))),
    (entries.AnyEntry, entries.Degraded(rank=1, why="the store")),
    (Verdict, VERDICT),
    (RankDigest, DIGEST),
    (GateDigest, DIGEST),
    (_Question, _Question(index=0, layer=Layer.GRAPH, part="")),
    (_Choice, _Choice(stamp="20260101T000000-0a1b", number=1)),
    (SetupDigest, SetupDigest(rank=1, domain="tp", shas={"weights": "0"})),
    (RankFacts, RankFacts(groups={"weights": {"w": "1"}})),
    (InputFacts, InputFacts(step=1, names=("x",), aspects={"x": {"shape": "[1]"}})),
    (PreflightQuestion, PreflightQuestion(elements="w", start=0, stop=64)),
    (Form, Form(dtype="float32", shape=(3,))),
    (Pieces, Pieces(hashes=("0",), elements=(("1.0", "0x1"),))),
    (RankStatus, RankStatus(rank=1, world_size=2, pid=1, host="here", phase="C/first", state="running")),
    (Calls, Calls(phase="C/steady", begun=({"0 default_pg": 3},))),
    (FastPathVote, FastPathVote(decision=DECISION, processor=Processor(model="cpu"))),
    (Decision, DECISION),
    (_Refusal, _Refusal(number=1, text="refused")),
    (Cell, CELL),
    (Brought, Brought(cell=CELL)),
    (Settled, Settled(problem="rank 1 did not come in time")),
    (RankProcess, RankProcess(pid=1, host="here")),
    (_Last, _Last(step=1, vote=VOTE)),
    (_Brought[Timings], _Brought[Timings](vote=VOTE, value={"default": 1.0})),
    (_Made[list[float]], _Made[list[float]](asked="bmm", made=[1.0])),
    (_Settled[Measurement], _Settled[Measurement](ranks=(1,), decided=Measurement(profile="default"))),
]  # fmt: skip
TABLES: list[tuple[Any, Any]] = [
    (dict[str, Ran], {"step": Ran(region="step", variants={1: "a"}).model_dump(mode="json")}),
    (dict[str, Counted], {"step": Counted(region="step", samples={1: {"i": 10**30}}).model_dump(mode="json")}),
    (tuple[Item, ...], [ITEM.model_dump(mode="json")]),
    (tuple[Check, ...], [CHECK.model_dump(mode="json")]),
]
MESSAGES: list[tuple[Any, Any]] = [*((kind, record.model_dump(mode="json")) for kind, record in RECORDS), *TABLES]
