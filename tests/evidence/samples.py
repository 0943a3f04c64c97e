"""Small records by hand: what a rank would know after one compile of `forward model.py:3`."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.evidence.comparison.compare import Allowed, compare
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.verdict import fetch_from
from tpcompile.evidence.records import (
    Collective,
    CompileRecord,
    Divergence,
    Graph,
    GraphBreak,
    Guard,
    InputTensor,
    Kernel,
    Node,
    PhaseCounters,
    RankRecord,
    UserLine,
)

F32 = "f32[4, 8][8, 1]cpu"


def line(number: int = 3, file: str = "/app/model.py") -> UserLine:
    """A line of the user's model."""
    return UserLine(file=file, line=number, function="forward", code="y = x * 2")


def call(target: str, *args: str, value: str = F32, at: int = 3) -> Node:
    """One call node."""
    return Node(scope="", op="call", target=target, args=args, value=value, line=line(at))


def reduce(operand: str = "%0", op: str = "sum", group: str = "tp", at: int = 5) -> Node:
    """One functional all-reduce."""
    return call("torch.ops._c10d_functional.all_reduce", operand, f"'{op}'", f"group:{group}", at=at)


def graph(*calls: Node, kind: str = "dynamo") -> Graph:
    """One input, the calls, one output."""
    x = Node(scope="", op="placeholder", target="L_x_", value=F32)
    out = Node(scope="", op="output", target="output", args=(f"(%{len(calls)},)",))
    return Graph(kind=kind, nodes=(x, *calls, out))


def guard(type_: str = "EQUALS_MATCH", source: str = "L['self'].scale", says: str = "== 1", at: int = 3) -> Guard:
    """One guard on a value of the model."""
    return Guard(type=type_, source=source, expression=f"{source} {says}", line=line(at))


def collective(op: str = "all_reduce", phase: str = "forward", **fields: object) -> Collective:
    """One collective in the tp group."""
    values = {"reduce_op": "sum", "dtype": "f32", "shape": "[4, 8]", "group": "tp", "line": line(5)} | fields
    return Collective.model_validate({"phase": phase, "op": op, **values})


def tensor(source: str = "L['x']", **fields: object) -> InputTensor:
    """One input tensor."""
    values = {"dtype": "float32", "shape": "[4, 8]", "stride": "[8, 1]", "device": "device(type='cpu')"} | fields
    return InputTensor.model_validate({"source": source, **values})


def kernel(code: str = "out = x * 2", name: str = "cpp_fused_mul_0", phase: str = "forward") -> Kernel:
    """One generated kernel."""
    return Kernel(phase=phase, name=name, kind="cpp_pybind", code=code)


def broken(at: int = 4, reason: str = "print") -> GraphBreak:
    """One graph break."""
    return GraphBreak(reason=reason, line=line(at), stack=(line(at),))


def compiled(*calls: Node, phase: str = "C/first", **fields: object) -> CompileRecord:
    """A healthy compile: `x * 2`, then an all-reduce, unless other calls or fields are given."""
    calls = calls or (call("mul", "%0", "2"), reduce("%1"))
    values: dict[str, object] = {
        "compile_id": "0/0",
        "function": "forward",
        "line": line(3),
        "inputs": (tensor(),),
        "graphs": (graph(*calls),),
        "guards": (guard(),),
        "collectives": (collective(),),
    }
    return CompileRecord.model_validate({"phase": phase, **values, **fields})


def lowered(*calls: Node, kind: str = "forward", **fields: object) -> CompileRecord:
    """A healthy compile with a lowered graph of these calls under the usual Dynamo graph."""
    dynamo = graph(call("mul", "%0", "2"), reduce("%1"))
    return compiled(graphs=(dynamo, graph(*calls, kind=kind)), **fields)


def record(rank: int, *compiles: CompileRecord, world_size: int = 2, **fields: object) -> RankRecord:
    """All evidence of one rank; coordinate is the rank."""
    values: dict[str, object] = {"coordinate": rank} | fields
    return RankRecord.model_validate({"rank": rank, "world_size": world_size, "compiles": compiles, **values})


def counters(phase: str = "C/first", **fields: int) -> PhaseCounters:
    """Dynamo's counters of a healthy first call."""
    return PhaseCounters(phase=phase, **({"calls": 1, "frames": 1, "graphs": 1} | fields))


def divergences(*records: RankRecord, allowed: Allowed = ()) -> tuple[Divergence, ...]:
    """Compare the ranks, details out of the records themselves."""
    return compare([digest_rank(r) for r in records], fetch_from(records), allowed=allowed)


def between(*compiles: CompileRecord | Sequence[CompileRecord], allowed: Allowed = ()) -> tuple[Divergence, ...]:
    """Compare ranks that differ in their compiles only; one argument per rank."""
    per_rank = [(c,) if isinstance(c, CompileRecord) else tuple(c) for c in compiles]
    return divergences(*(record(r, *c, world_size=len(per_rank)) for r, c in enumerate(per_rank)), allowed=allowed)


def only(*compiles: CompileRecord | Sequence[CompileRecord], allowed: Allowed = ()) -> Divergence:
    """The one divergence between these ranks."""
    found = between(*compiles, allowed=allowed)
    assert len(found) == 1, [d.title for d in found]
    return found[0]
