"""The items in which groups of ranks differ -> the cause, read from the fields of the items."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.digest import SEPARATOR
from tpcompile.evidence.records import Item
from tpcompile.evidence.rows import Row

BREAK, FAILED = "graph break", "compile failed"
"""What an item of the graph layer is about when it is no node."""

LIMIT = "Dynamo recompile limit exceeded"
"""How torch's reason begins when it gave up on a function."""

_INPUT_FIELD = re.compile(r"(\w+)=(.*?)(?= \w+=|$)")
_INPUT_CAUSES = {
    "dtype": Cause.DTYPE,
    "device": Cause.DISPATCH_KEY,
    "shape": Cause.SHAPE,
    "stride": Cause.STRIDE,
    "requires_grad": Cause.REQUIRES_GRAD,
    "dynamic": Cause.AUTOMATIC_DYNAMIC,
}
_COLLECTIVE = re.compile(r"^(?P<op>\w+)\((?P<fields>.*)\)$")
_COLLECTIVE_FIELD = re.compile(r"(\w+)=(.*?)(?=, \w+=|$)")
HANGS = frozenset({
    Cause.REDUCE_OP, Cause.GROUP, Cause.ORDER_FORWARD, Cause.ORDER_BACKWARD, Cause.EXTRA_COLLECTIVE,
    Cause.COLLECTIVE_SIZES, Cause.UNWAITED,
})  # fmt: skip
"""Causes by which ranks wait for each other, or meet in a collective that does not fit."""
_COLLECTIVE_CAUSES = {
    "group": Cause.GROUP,
    "reduce_op": Cause.REDUCE_OP,
    "dtype": Cause.COLLECTIVE_SIZES,
    "shape": Cause.COLLECTIVE_SIZES,
    "waited": Cause.UNWAITED,
}
_NODE = re.compile(r"^(?P<op>\w+) (?P<target>[^(]*)\((?P<args>.*)\) -> (?P<value>.*)$", re.DOTALL)
_VALUE = re.compile(r"^(?P<dtype>[\w(]+)(?P<shape>\[[^\]]*\])(?P<stride>\[[^\]]*\])?")
_FUNCTIONAL = re.compile(r"^torch\.ops\.(?:_c10d_functional(?:_autograd)?|symm_mem)\.\w+")
_REFERENCE = re.compile(r"%\d+")
_UNNAMED = re.compile(r"group=group#\d+")
_GROUP = re.compile(r"group:[^,)]+")
_STRING = re.compile(r"'[^']*'")
_KEYS = re.compile(r"DispatchKeySet\([^)]*\)")
_TENSOR_GRAD = re.compile(r"\brequires_grad=(\w+)")
_ISSUED = re.compile(r"torch\.ops\._c10d_functional\.(\w+?)_?(?:\.default)?\((?:[^,]*)((?:, [^,]*)*)\)")
_VIEW = re.compile(r"reinterpret_tensor\([^()]*(?:\([^()]*\)[^()]*)*\)")
"""A view of a buffer, at an offset that may follow the rank."""
_BUFFER = re.compile(r"\b(?:buf|arg)\d\w*")
_MATMUL_CHOICE = re.compile(r"extern_kernels\.|_tem_|gemm|mkldnn|aten\.(?:mm|addmm|bmm)|num_warps|num_stages|BLOCK")
_STATE = re.compile(r"against (\{.*\})")
_STATE_CAUSES = {"grad_mode": Cause.REQUIRES_GRAD, "autocast_state": Cause.DTYPE, "default_dtype": Cause.DTYPE}
_TYPE_GUARDS = frozenset({"TYPE_MATCH", "CLASS_MATCH"})
_SUBCLASSES = ("AsyncCollectiveTensor", "DTensor")


@dataclass(frozen=True)
class Call:
    """One node of a graph item."""

    op: str
    target: str
    args: str
    value: str

    @property
    def is_collective(self) -> bool:
        """True for a functional collective."""
        return bool(_FUNCTIONAL.match(self.target)) and "wait_tensor" not in self.target


def says(item: Item) -> str:
    """What an item says, without what it is about."""
    return item.text.partition(SEPARATOR)[2]


def about(item: Item) -> str:
    """What an item is about."""
    return item.text.partition(SEPARATOR)[0]


def node(item: Item) -> Call | None:
    """The node of a graph item; None for a break, a failure or text that is no node."""
    match = _NODE.match(says(item))
    return Call(match["op"], match["target"], match["args"], match["value"]) if match else None


def is_break_or_failure(item: Item) -> bool:
    """True for an item of the graph layer that is no node."""
    return about(item).startswith(BREAK) or about(item) == FAILED


def inputs(row: Row, *, is_dynamic: bool) -> Cause:
    """Cause of a differing input; `is_dynamic` says that a size is a symbol on some ranks only."""
    fields = [dict(_INPUT_FIELD.findall(says(item))) for item in row if item]
    if len(fields) < len(row):
        return Cause.RANK_BRANCH  # a tensor that only one side reads
    differing = [name for name in _INPUT_CAUSES if len({f.get(name) for f in fields}) > 1]
    if "shape" in differing and is_dynamic:
        return Cause.AUTOMATIC_DYNAMIC
    return _INPUT_CAUSES[differing[0]] if differing else Cause.UNKNOWN


def graph(row: Row) -> Cause:
    """Cause of a differing item of a Dynamo graph whose collectives agree."""
    present = [item for item in row if item]
    if any(about(item).startswith(BREAK) for item in present):
        return Cause.GRAPH_BREAK
    if any(about(item) == FAILED for item in present):
        limit = any(says(item).startswith(LIMIT) for item in present)
        return Cause.RECOMPILE_LIMIT if limit else Cause.COMPILE_FAILED
    calls = [node(item) for item in present]
    if len(calls) < len(row) or not all(calls) or len({(c.op, c.target) for c in calls if c}) > 1:
        return Cause.RANK_BRANCH
    return _same_op([c for c in calls if c])


def _same_op(calls: Sequence[Call]) -> Cause:
    if len({c.args for c in calls}) == 1:
        return _value({c.value for c in calls})
    if len({tuple(_REFERENCE.findall(c.args)) for c in calls}) > 1:
        return Cause.RANK_BRANCH  # the same op reads other tensors
    if not calls[0].is_collective:
        return Cause.RANK_CONSTANT
    if len({tuple(_GROUP.findall(c.args)) for c in calls}) > 1:
        return Cause.GROUP
    return Cause.REDUCE_OP if len({_STRING.sub("", c.args) for c in calls}) == 1 else Cause.COLLECTIVE_SIZES


def _value(values: set[str]) -> Cause:
    """The same call with another result: the metadata of its inputs differs."""
    if len({"#" in value for value in values}) > 1:
        return Cause.AUTOMATIC_DYNAMIC
    parts = [match for value in values if (match := _VALUE.match(value))]
    if len(parts) == len(values):
        for name in ("dtype", "shape", "stride"):
            if len({p[name] for p in parts}) > 1:
                return _INPUT_CAUSES[name]
    return Cause.UNKNOWN


def collectives(items: Sequence[Sequence[Item]]) -> Cause:
    """Cause of differing collectives; `items` are the whole layers, one per group of ranks."""
    # A group nobody named is numbered by first appearance, so its number moves when collectives do.
    counts = [Counter(_UNNAMED.sub("group=?", item.text) for item in group) for group in items]
    rows = [row for row in zip(*items, strict=False) if len({item.text for item in row}) > 1]
    if rows and all(count == counts[0] for count in counts):
        return Cause.ORDER_BACKWARD if about(rows[0][0]) == "backward" else Cause.ORDER_FORWARD
    if len({len(group) for group in items}) > 1 or not rows:
        return Cause.EXTRA_COLLECTIVE
    parsed = [match for item in rows[0] if (match := _COLLECTIVE.match(says(item)))]
    if len(parsed) < len(rows[0]) or len({p["op"] for p in parsed}) > 1:
        return Cause.EXTRA_COLLECTIVE
    fields = [dict(_COLLECTIVE_FIELD.findall(p["fields"])) for p in parsed]
    differing = [name for name in _COLLECTIVE_CAUSES if len({f.get(name) for f in fields}) > 1]
    return _COLLECTIVE_CAUSES[differing[0]] if differing else Cause.EXTRA_COLLECTIVE


def guards(row: Row) -> Cause:
    """Cause of a differing guard under equal graphs."""
    texts = [says(item) for item in row if item]
    types = {text.partition(": ")[0] for text in texts}
    if types == {"GLOBAL_STATE"}:
        return _state_guard(texts)
    if types == {"GRAD_MODE"}:
        return Cause.REQUIRES_GRAD
    if types == {"TENSOR_MATCH"}:
        return _tensor_guard(texts)
    if types & _TYPE_GUARDS and any(name in text for name in _SUBCLASSES for text in texts):
        return Cause.TENSOR_SUBCLASS
    return Cause.GUARD_ONLY


def _state_guard(texts: Sequence[str]) -> Cause:
    states = [json.loads(match[1]) for text in texts if (match := _STATE.search(text))]
    differing = {key for state in states for key in state if any(s.get(key) != state[key] for s in states)}
    return next((cause for key, cause in _STATE_CAUSES.items() if key in differing), Cause.ENVIRONMENT)


def _tensor_guard(texts: Sequence[str]) -> Cause:
    if len(texts) > 1 and len({tuple(_TENSOR_GRAD.findall(text)) for text in texts}) > 1:
        return Cause.REQUIRES_GRAD
    if len(texts) > 1 and len({tuple(_KEYS.findall(text)) for text in texts}) > 1:
        return Cause.DISPATCH_KEY
    return Cause.GUARD_ONLY


def lowered(items: Sequence[Sequence[Item]], row: Row) -> Cause:
    """Cause of differing lowered graphs under equal Dynamo graphs."""
    padded = {sum("constant_pad_nd" in item.text for item in group) for group in items}
    if len(padded) > 1:
        return Cause.AUTOTUNE  # Inductor times whether padding a matmul makes it faster, each rank for itself
    saved = {
        sum(len(_REFERENCE.findall(c.args)) for i in group if (c := node(i)) and c.op == "output") for group in items
    }
    return Cause.PARTITIONER if len(saved) > 1 else Cause.COMPILER_PASS


def kernels(items: Sequence[Sequence[Item]]) -> Cause:
    """Cause of differing generated code under equal lowered graphs."""
    everywhere = set.intersection(*({item.text for item in group} for group in items))
    differing = (item.text for group in items for item in group if item.text not in everywhere)
    chosen = any(_MATMUL_CHOICE.search(text) for text in differing)
    return Cause.AUTOTUNE if chosen and not reordered(items) else Cause.COMPILER_PASS


def reordered(items: Sequence[Sequence[Item]]) -> bool:
    """True when the generated code issues other collectives, or the same in another order: a hang."""
    issued = {
        tuple(
            (m[1], _BUFFER.sub("%", m[2]))
            for item in group
            if (m := _ISSUED.search(_VIEW.sub("buf0", says(item)))) and "wait_tensor" not in m[1]
        )
        for group in items
    }
    return len(issued) > 1
