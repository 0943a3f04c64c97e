"""A launch -> what a person calls it, with one colour in a terminal and in a plot."""

from __future__ import annotations

from enum import StrEnum

from tpcompile.fusion.manifest_records import Launch, Role


class Kind(StrEnum):
    """What a launch is, as legends name it."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    TEMPLATE = "matmul template"
    LOOPS = "other kernel"
    LIBRARY = "library call"
    COLLECTIVE = "collective"
    EAGER = "copy, eager op"


_OF_KERNEL = {
    "poi": Kind.POINTWISE,
    "for": Kind.POINTWISE,
    "red": Kind.REDUCTION,
    "per": Kind.REDUCTION,
    "spl": Kind.REDUCTION,
    "tem": Kind.TEMPLATE,
}
"""Inductor's three letters in the name of a kernel -> its kind."""
_OF_ROLE = {
    Role.EXTERN: Kind.LIBRARY,
    Role.COLLECTIVE: Kind.COLLECTIVE,
    Role.WAIT: Kind.COLLECTIVE,
    Role.COPY: Kind.EAGER,
    Role.WRAPPER: Kind.EAGER,
}
COLOURS = {
    Kind.POINTWISE: ("green", "#009E73"),
    Kind.REDUCTION: ("cyan", "#56B4E9"),
    Kind.TEMPLATE: ("red", "#D55E00"),
    Kind.LOOPS: ("white", "#999999"),
    Kind.LIBRARY: ("blue", "#0072B2"),
    Kind.COLLECTIVE: ("magenta", "#CC79A7"),
    Kind.EAGER: ("yellow", "#E69F00"),
}
"""Of each kind in a terminal, and in a plot: those of Okabe and Ito, which people with any colour vision can tell
apart."""


def kind_of(launch: Launch) -> Kind:
    """The kind of a generated kernel by Inductor's name for it, of all others by what launches it."""
    if launch.role is Role.KERNEL:
        return _OF_KERNEL.get(launch.kind, Kind.LOOPS)
    return _OF_ROLE[launch.role]


def label(launch: Launch) -> str:
    """`poi`, `cpp`, `collective`, ..., at most 10 columns."""
    return launch.kind if launch.role is Role.KERNEL else str(launch.role)


def ops_text(launch: Launch, width: int) -> str:
    """What it computes, as many ops as fit and the number of the others; of a kernel that is not aligned, its name."""
    ops = [op.removeprefix("aten.").removeprefix("_c10d_functional.") for op in launch.ops]
    words = ops or [launch.name]
    text = " ".join(words)
    left = 0
    while len(text) > width and left < len(words) - 1:
        left += 1
        text = " ".join([*words[:-left], f"+{left}"])
    return text if len(text) <= width else shortened(words[0], width)


def shortened(text: str, width: int) -> str:
    """Its beginning, where it is too long."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(number: int) -> str:
    """1234 -> 1.2 kB."""
    size = float(number)
    for unit in _UNITS[:-1]:
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} {_UNITS[-1]}"
