"""Text of a recompile reason -> which guard failed, on what, as fields.

The one parser of these texts. Seen on torch 2.11.0 and 2.13.0: `0/0: tensor 'x' size mismatch at index 0. expected 8,
actual 9`, or a guard's expression with a comment and the user's stack behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum

from tpcompile.evidence.records import Frozen, UserLine
from tpcompile.evidence.records.base import at_text
from tpcompile.evidence.text.comments import comment_line, split_comments, stack_lines
from tpcompile.evidence.text.lines import innermost, users

LIMIT = "Dynamo recompile limit exceeded"
"""How torch's error begins when a function exceeded the recompile limit."""


class ReasonKind(StrEnum):
    """What changed between the compiled code and this call."""

    SIZE = "size"
    STRIDE = "stride"
    DTYPE = "dtype"
    REQUIRES_GRAD = "requires_grad"
    NUM_DIMS = "number of dimensions"
    DEVICE = "device"
    DISPATCH_KEYS = "dispatch keys"
    TENSOR_TYPE = "tensor type"
    SIZE_BOUND = "bound on a size"
    """A relation that a dynamic dimension must keep, e.g. `2 <= x.size()[0]`."""
    DYNAMIC_MARK = "dynamic mark"
    GLOBAL_STATE = "global state"
    TRAINING = "training mode"
    MODULE_INT = "int attribute of a module"
    NUMBER = "Python number"
    VALUE = "Python value"
    LENGTH = "length"
    KEYS = "keys"
    IDENTITY = "object identity"
    TYPE = "Python type"
    DUPLICATE = "one tensor for two arguments"
    OTHER = "other"


class Reason(Frozen):
    """One failed guard."""

    kind: ReasonKind
    guard: str
    """The guard as torch prints it, on one line, without cache entry, comment and stack."""
    entry: str = ""
    """Compile id of the cache entry whose guard failed, e.g. `0/1`."""
    source: str = ""
    """What was checked, e.g. `x` or `self.k`; empty for the state of the process."""
    dim: int | None = None
    """Dimension of a size or stride."""
    expected: str = ""
    actual: str = ""
    """Empty where torch does not say."""
    line: UserLine | None = None
    """The user's line that asked for the guard, where torch names it."""

    @property
    def what(self) -> str:
        """`size[0]`: what changed, with the dimension where there is one."""
        return self.kind if self.dim is None else f"{self.kind}[{self.dim}]"


_ENTRY = re.compile(r"^\[?(?P<entry>\d+/\d+)\]?: ")
_TENSOR = re.compile(
    r"^tensor '(?P<source>.*?)' (?:Tensor )?"
    r"(?P<what>size|stride|dtype|requires_grad|rank|device index|dispatch key set) mismatch(?: at index (?P<dim>\d+))?"
    r"(?:\. [Ee]xpected (?:device index to be |requires_grad=)?(?P<expected>.*?)(?:, (?:actual|got) (?P<actual>.*))?)?$"
)
_MARK = re.compile(r"^(?=.*(?:dynamo_dim_marking|_dynamo_))(?:(?>.*?hasattr\()(?P<source>[^,]+),)?")
_SIZE_OF = re.compile(
    r"^(?=(?P<expected>.*)$).*?(?<![\w.\[\]'])(?P<source>[\w.\[\]']+)\.(?:size|stride)\(\)\[(?P<dim>\d+)\]"
)
_STATE = re.compile(r"^GLOBAL_STATE changed:\s*(?P<expected>.*)$")
_LENGTH = re.compile(r"^len\((?P<source>.+?)\) (?:==|!=|>=|<=) (?P<expected>\d+)$")
_KEYS_OF = re.compile(r"^(?>.*?dict\.keys\()(?P<source>[^)]+)\)")
_HOLDER = re.compile(r"^(?>.*?___dict_contains\().*, (?P<source>(?:(?!, )[^)])+)\)")
_EQUALS = re.compile(r"^(?!___)(?P<source>[^=<>!]+?) (?:==|is) (?P<expected>.+)$")
_DUPLICATE = re.compile(r"^Duplicate tensors found: (?P<source>.*)$")
_TENSOR_TYPE = re.compile(
    r"^(?>.*?expected type of ')(?P<source>[^']*)' to be (?P<expected>.*?)(?:, '|,)? but found (?P<actual>.*)$"
)
_CALLED = re.compile(r"^___check_(?P<what>\w+)\((?P<source>[^,)]+)")
_NUMBER = re.compile(r"^-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf|nan)$")
_OBJECT_ID = re.compile(r", \d{6,}\)")
_PLAIN = re.compile(r"^<class '(?:int|float|bool|complex|str|NoneType|list|tuple|dict)'>$")
_INT = re.compile(r"^-?\d+$")
_OF_MODULE = re.compile(r"(?:L\['self'\]|self)\b")
_TENSOR_KINDS = {
    "size": ReasonKind.SIZE, "stride": ReasonKind.STRIDE, "dtype": ReasonKind.DTYPE, "rank": ReasonKind.NUM_DIMS,
    "requires_grad": ReasonKind.REQUIRES_GRAD, "device index": ReasonKind.DEVICE,
    "dispatch key set": ReasonKind.DISPATCH_KEYS,
}  # fmt: skip
_DEPTH = {
    ReasonKind.GLOBAL_STATE: 0, ReasonKind.OTHER: 0, ReasonKind.TYPE: 1, ReasonKind.TENSOR_TYPE: 1,
    ReasonKind.DISPATCH_KEYS: 1, ReasonKind.DTYPE: 2, ReasonKind.DEVICE: 2, ReasonKind.REQUIRES_GRAD: 2,
    ReasonKind.NUM_DIMS: 3, ReasonKind.STRIDE: 5,
}  # fmt: skip
"""Number of guard stages that held before that guard, in the order in which torch checks; 4 for any other kind."""


def nearest_reason(reasons: Sequence[str]) -> str:
    """The reason of the cache entry in which most guards held, the newest of several; "" when there is none.

    Torch gives one reason per entry, newest first: the first guard that failed. With one entry for training and one
    for evaluation, a call with a different stride fails on grad mode in one of them, which is not why it recompiles.
    """

    def held(text: str) -> tuple[int, int]:
        reason = parse_reason(text)
        return _DEPTH.get(reason.kind, 4), reason.dim or 0

    return max(reasons, key=held, default="")


def parse_reason(text: str) -> Reason:
    """Parse one recompile reason; a text of an unknown form is kept as it is, with kind `OTHER`."""
    head, _, stack = text.partition("\nUser stack trace:")
    entry = _ENTRY.match(head)
    head = head[entry.end() :] if entry else head
    guard, comments = split_comments(" ".join(head.split("\n")))
    guard = guard.partition(". Guard failed on a parameter")[0]  # what follows is advice
    guard = _OBJECT_ID.sub(")", guard).strip()  # ids differ between ranks and runs
    # the innermost frame of the user's stack has the whole path; the comment has the end of it
    line = innermost(stack_lines(stack)) or users(comment_line(comments))
    return _of_guard(guard).changed(entry=entry["entry"] if entry else "", line=line)


def in_one_line(text: str) -> str:
    """One recompile reason without its stack and the spaces before its comment: `0/0: self.k == 1 at model.py:3`."""
    reason = parse_reason(text)
    entry = f"{reason.entry}: " if reason.entry else ""
    return f"{entry}{reason.guard}{at_text(reason.line)}"


def _of_guard(guard: str) -> Reason:
    for form, kind_of in _FORMS:
        match = form.search(guard)
        if match is None:
            continue
        parts = match.groupdict("")
        dim = parts.get("dim")
        return Reason(
            kind=kind_of(parts),
            guard=guard,
            source=parts.get("source", "").strip(),
            dim=int(dim) if dim else None,
            expected=parts.get("expected", "").strip(),
            actual=parts.get("actual", ""),
        )
    return Reason(kind=ReasonKind.OTHER, guard=guard)


def _value_kind(parts: dict[str, str]) -> ReasonKind:
    source = parts["source"]
    expected = parts["expected"]
    if source.endswith(".training"):
        return ReasonKind.TRAINING
    if _INT.match(expected) and _OF_MODULE.match(source):
        return ReasonKind.MODULE_INT
    if _NUMBER.match(expected):
        return ReasonKind.NUMBER
    return ReasonKind.VALUE


_FORMS: tuple[tuple[re.Pattern[str], Callable[[dict[str, str]], ReasonKind]], ...] = (
    (_TENSOR, lambda parts: _TENSOR_KINDS[parts["what"]]),
    (_MARK, lambda _: ReasonKind.DYNAMIC_MARK),
    (_SIZE_OF, lambda _: ReasonKind.SIZE_BOUND),
    (_STATE, lambda _: ReasonKind.GLOBAL_STATE),
    (_LENGTH, lambda _: ReasonKind.LENGTH),
    (_HOLDER, lambda _: ReasonKind.KEYS),
    (_KEYS_OF, lambda _: ReasonKind.KEYS),
    (_EQUALS, _value_kind),
    (_DUPLICATE, lambda _: ReasonKind.DUPLICATE),
    (_TENSOR_TYPE, lambda parts: ReasonKind.TYPE if _PLAIN.match(parts["actual"]) else ReasonKind.TENSOR_TYPE),
    (_CALLED, lambda parts: ReasonKind.TYPE if parts["what"].startswith("type") else ReasonKind.IDENTITY),
)
"""Pattern of a guard in a reason -> kind; the first that matches counts."""
