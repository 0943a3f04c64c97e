"""The op with which wrong numbers begin: what it is, where it is, and what kind of mistake its numbers show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

from tpcompile.evidence.records.base import Frozen, UserLine, at_text


class MistakeKind(StrEnum):
    """What is wrong with a value, as its ratio to the right one on each rank shows it."""

    UNKNOWN = ""
    NOT_SUMMED = "not summed"
    GRADIENT_NOT_SUMMED = "gradient not summed"
    GRADIENT_CUT = "gradient cut"
    TP_TIMES = "tp times"
    ONE_OF_TP = "1 / tp"
    PER_RANK = "counted per rank"
    OTHER_PART = "part of a different rank"
    CUT_AS_ONE = "packed weight cut as one"
    LOCAL_STATISTIC = "local statistic"
    MULTIPLE = "multiple"
    ORDER = "different order"
    MASKED = "masked differently"
    LATE = "one step late"
    LEFT_OUT = "left out"
    WRONG_GROUP = "summed over the wrong group"
    COARSER = "coarser dtype"
    OTHER_NUMBER = "other number"
    CROSSES = "crosses shards"


_SAYS = {
    MistakeKind.UNKNOWN: "{what} has no equal in the single-device run",
    MistakeKind.NOT_SUMMED: "its result is right only when it is summed over the ranks{more}",
    MistakeKind.GRADIENT_NOT_SUMMED: "the gradient of {of} is right only when it is summed over the ranks, and it is "
    "not: what the ranks do behind it differs",
    MistakeKind.GRADIENT_CUT: "the gradient that comes through it on a single device does not arrive: it is cut off",
    MistakeKind.TP_TIMES: "{what} is {ratio} times the reference: what all {size} ranks hold alike, or the mean of "
    "each, is summed over them",
    MistakeKind.ONE_OF_TP: "{what} is 1/{size} of the reference: a sum over the ranks is divided by their number, or a "
    "mean is meant to be a sum",
    MistakeKind.PER_RANK: "{of}, which each rank holds whole, is added to its part of a sum: the sum over the ranks "
    "counts it {size} times",
    MistakeKind.OTHER_PART: "{what} is {whose}: an offset, a position or an index is not this rank's own",
    MistakeKind.CUT_AS_ONE: "{of} is cut as one matrix and then taken apart in {pieces}: each piece has to be sharded "
    "by itself",
    MistakeKind.LOCAL_STATISTIC: "it is a statistic of this rank's shard, and {what} is used for the whole",
    MistakeKind.MULTIPLE: "{what} is {ratio} times the reference",
    MistakeKind.ORDER: "{what} has the numbers of the reference in a different order",
    MistakeKind.MASKED: "{what} differs from the reference in some rows only{more}",
    MistakeKind.WRONG_GROUP: "what the ranks gave is right as the sum over all {size} of them, and the result is not "
    "that sum: it is taken over a different group, or is no sum",
    MistakeKind.OTHER_NUMBER: "it is given the number {of}: is it made of the number of ranks, or of a shard's size?",
    MistakeKind.CROSSES: "it moves or combines places along a dim of which this rank has a part: at its ends it needs "
    "what the neighbours hold",
    MistakeKind.COARSER: "{what} is in {of}, and what is made of it is right within its roundings only",
    MistakeKind.LEFT_OUT: "it was given {of} as it is earlier: what the reference does in between is left out",
    MistakeKind.LATE: "it was given {of} as it was before, not as it is then: one step late",
}


class WrongOp(Frozen):
    """The first op, in the order of execution, whose result is wrong while its inputs are right."""

    about: str
    """The op, e.g. `aten.mm`; or the parameter or buffer that is wrong as it was given."""
    line: UserLine | None = None
    """Line of the op; in a backward pass that of the op whose gradient it makes."""
    module: str = ""
    """Name of the innermost module that ran it."""
    place: int = 0
    """Number of the op among those of the rank."""
    kind: MistakeKind = MistakeKind.UNKNOWN
    in_backward: bool = False
    is_given: bool = False
    """A tensor that the run was given, not a result."""
    is_update: bool = False
    """What the op adds to a tensor in place is compared, not the tensor."""
    of: str = ""
    """What the mistake was made with: a parameter, or the op that made what was not summed."""
    size: int = 1
    """Number of ranks."""
    ratio: float | None = None
    """Result over right result, where the one is a multiple of the other."""
    other: int = -1
    """The rank whose part it is, -1 for one that is not known."""
    pieces: str = ""
    """What a packed value was taken apart in, e.g. `2 pieces`."""
    got: float | None = None
    """Norm of the result; its value where it has one element."""
    wanted: float | None = None
    """The same of the right result; None where it is not known."""

    @property
    def says(self) -> str:
        """What is wrong, for a person."""
        what = "this tensor" if self.is_given else "its result"
        if self.in_backward:
            what = "a gradient"
        if self.is_update:
            what = "what it adds"
        more = f", {self.of}" if self.of else ""
        text = _SAYS[self.kind].format(
            what=what,
            more=more,
            of=self.of or "what it returns",
            size=self.size,
            ratio="" if self.ratio is None else multiple_text(self.ratio, self.size),
            whose="not what this rank should have" if self.other < 0 else f"what rank {self.other} should have",
            pieces=self.pieces,
        )
        if self.got is None or self.wanted is None:
            return text
        return f"{text} ({self.got:.4g}, in the reference {self.wanted:.4g})"

    @property
    def text(self) -> str:
        """The op with its module and line, and what is wrong."""
        return f"{self._name}{at_text(self.line)}: {self.says}"

    @property
    def brief(self) -> str:
        """The same without the line."""
        return f"{self._name}: {self.says}"

    @property
    def _name(self) -> str:
        return f"{self.about} in {self.module}" if self.module else self.about


def earliest(found: Mapping[int, WrongOp]) -> tuple[WrongOp, tuple[int, ...]] | None:
    """Of the findings by rank the first in the order of execution, with the ranks that have it; None without any."""
    if not found:
        return None
    first = min(found.values(), key=lambda op: op.place)
    same = {rank: op for rank, op in found.items() if (op.about, op.line) == (first.about, first.line)}
    named = [op for op in same.values() if op.kind]  # by chance a rank's part may be right in the wrong place
    return (named or [first])[0], tuple(same)


def multiple_text(ratio: float, size: int) -> str:
    """`2`, `1/2`, or `1.41 (sqrt 2)`: a factor, with the number of ranks where it is made of that."""
    for text, factor in (
        (f"{size}", size), (f"1/{size}", 1 / size), (f"{size**0.5:.3g} (sqrt {size})", size**0.5),
        (f"{size**-0.5:.3g} (1 / sqrt {size})", size**-0.5),
    ):  # fmt: skip
        if size > 1 and math.isclose(ratio, factor, rel_tol=1e-3):
            return text
    digits = 3 if abs(ratio - 1) > 0.05 else 5
    return f"{ratio:.{digits}g}"
