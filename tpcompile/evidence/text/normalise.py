"""Text that differs by nature between healthy ranks -> text that does not.

Only what is known to be an id, an address, a path, a device index or a group name is removed; a number that could be
the user's is kept, because a digest without it would not see a difference in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{5,}\b")
_DEVICE = re.compile(r"\b(cuda|xpu|hip|mtia|npu):\d+\b")
_DEVICE_CALL = re.compile(r"device\(type='(\w+)', index=\d+\)")
_CODE_OBJECT = re.compile(r"<code object (\S+) at \S+, file \"[^\"]*\", line \d+>")
_MODULE = re.compile(r"<module '([^']*)'(?: from '[^']*')?(?: \([^()]*\))?>")
_AT_ADDRESS = re.compile(r"(?<!\s)\s++at 0x[0-9a-fA-F]+")
_WRAPPED_ERROR = re.compile(
    r"(?s:(?>.*?\bgot \w*(?:Error|Exception)\((?P<quote>['\"])))(?P<says>.*?)(?:\\n|(?P=quote)\))"
)
_DYNAMO_COUNTER = re.compile(
    r"\b(__builtins_dict__|__compiled_fn|__resume_at|__optimizer|__nested_fn|torch_obj)_+\d+(?:_\w+)?"
)
_GLOBAL_BY_ID = re.compile(r"_\d{6,}_c(?:!?\d+/)*\d+\b")  # `___check_opaque_guard_fn_140115977097824_c0/0`
_DTENSOR_SPEC = re.compile(r"(__dtensor_spec_)\d+")
_FOLDED = re.compile(r"^(\w+?)_\d+$")
_QUOTED_OR_MARK = re.compile(r"'(?:[^'\\]|\\.)*+(?:'|\\?\Z)|\"(?:[^\"\\]|\\.)*+(?:\"|\\?\Z)|[(\[{}\]):,]", re.DOTALL)
_MAX_DEPTH = 100
"""Brackets inside each other; text with more of them is left as it is."""
_SYMBOL = re.compile(r"\b(zu?f|[su])(\d+)\b(?!\[)")  # `u8[4]` is a dtype, not a symbol
_COLLECTIVE = r"torch\.ops\.(?:_c10d_functional(?:_autograd)?|symm_mem|_dtensor|tpcompile\.all_reduce_\w+)\.\w++"
_FUNCTIONAL_GROUP = re.compile(rf"({_COLLECTIVE}(?:\.\w++)?+\((?:(?!{_COLLECTIVE}).)*?,\s*)(['\"])([^'\"]*)\2\)")


def device(text: str) -> str:
    """Drop device indices: that rank 3 runs on `cuda:3` is not a difference."""
    return _DEVICE_CALL.sub(r"device(type='\1')", _DEVICE.sub(r"\1", text))


def objects(text: str) -> str:
    """Drop addresses, and the paths inside reprs of code objects and modules."""
    text = _CODE_OBJECT.sub(r"<code \1>", text)
    text = _MODULE.sub(r"<module \1>", text)
    return _ADDRESS.sub("ADDRESS", _AT_ADDRESS.sub("", text))


def sets(text: str) -> str:
    """Sort the elements of set displays: their order depends on the hash seed and on the ids of objects."""
    if "{" not in text:
        return text
    brackets = [_Bracket("")]
    read = 0
    for token in _QUOTED_OR_MARK.finditer(text):
        brackets[-1].add(text[read : token.start()])
        read = token.end()
        mark = token[0]
        if mark in ("(", "[", "{"):
            brackets.append(_Bracket(mark))
        elif mark in (")", "]", "}") and len(brackets) > 1:
            closed = brackets.pop()
            brackets[-1].add(closed.text(mark))
        else:
            brackets[-1].take(mark)
        if len(brackets) > _MAX_DEPTH:
            return text
    brackets[-1].add(text[read:])
    return "".join(bracket.text("") for bracket in brackets)


class _Bracket:
    """What is read since a bracket that is still open, or since the beginning of the text."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.elements: list[list[str]] = [[]]
        """The pieces of each element, separated by commas."""
        self.has_colon = False

    def add(self, piece: str) -> None:
        self.elements[-1].append(piece)

    def take(self, token: str) -> None:
        """A comma, a colon, a quoted text, or a bracket that closes none."""
        if token == ",":
            self.elements.append([])
            return
        self.has_colon |= token == ":"
        self.add(token)

    def text(self, end: str) -> str:
        """All of it, up to the mark that closes it; the elements of a set display in order."""
        elements = list(map("".join, self.elements))
        stripped = [element.strip() for element in elements]
        is_closed = self.mark + end == "{}"
        if is_closed and all(stripped) and not self.has_colon:
            return "{" + ", ".join(sorted(stripped)) + "}"
        return self.mark + ",".join(elements) + end


@lru_cache(maxsize=4096)
def generic(text: str) -> str:
    """Drop device indices, addresses, and the counters and ids in the names of globals that Dynamo makes: safe on any
    text of torch."""
    text = _DYNAMO_COUNTER.sub(r"\1", device(objects(text)))
    text = _DTENSOR_SPEC.sub(r"\1ID", text)
    return _GLOBAL_BY_ID.sub("_ID", text)


def symbols(text: str, seen: dict[str, str]) -> str:
    """Rename shape symbols (`s77`, `u0`) by first appearance; `seen` carries the renaming through one graph."""
    return _SYMBOL.sub(lambda m: seen.setdefault(m[0], f"{m[1]}#{len(seen)}"), text)


def constant(source: str, seen: dict[str, str]) -> str:
    """Renumber a tensor that Dynamo folded (`eq_6`) by first appearance: torch counts over the whole process.

    A name of the user's, `L['eq_6']`, is never such a bare word; `seen` carries the renaming through one compile.
    """
    match = _FOLDED.match(source)
    if match is None:
        return source
    renamed = f"{match[1]}#{len(seen)}"
    return seen.setdefault(source, renamed)


def short_path(path: str) -> str:
    """Last two parts of a path: the same on every machine, and enough to find the file."""
    return "/".join(path.replace("\\", "/").split("/")[-2:])


class GroupRoles:
    """Process-group name -> role in the mesh.

    A name without a role becomes `group#k` by first appearance, so that unknown names neither hide a difference in
    structure nor are one.
    """

    def __init__(self, roles: Mapping[str, str]) -> None:
        self._roles = dict(roles)

    def __call__(self, name: str) -> str:
        if name not in self._roles:
            num_unknown = sum(role.startswith("group#") for role in self._roles.values())
            self._roles[name] = f"group#{num_unknown}"
        return self._roles[name]

    def knows(self, name: str) -> bool:
        """True for the name of a group of the mesh, or of one that was seen."""
        return name in self._roles

    @property
    def items(self) -> tuple[tuple[str, str], ...]:
        """(name, role) of all, including those without a known role that were seen."""
        return tuple(self._roles.items())

    def meet(self, other: GroupRoles) -> None:
        """Add the names that the other has seen."""
        self._roles |= other._roles

    def in_calls(self, text: str) -> str:
        """Replace the group argument of functional collectives in generated code."""
        return _FUNCTIONAL_GROUP.sub(lambda m: f"{m[1]}group:{self(m[3])})", text)


def stripped_lines(text: str) -> list[str]:
    """The lines that are not blank, without the space around them."""
    return list(filter(None, map(str.strip, text.splitlines())))


def error(text: str) -> str:
    """The first line of an error, and the error that it wraps.

    `backend='inductor' raised:` needs the line after it, and `RuntimeError when making fake tensor call` the
    operator's own message, which follows `got RuntimeError(`.
    """
    lines = stripped_lines(text)
    headline = "".join(lines[:1])
    if headline.endswith(":"):
        return generic(" ".join(lines[:2]))
    wrapped = _WRAPPED_ERROR.match(text)
    if wrapped:
        headline += f": {wrapped['says']}"
    return generic(headline)
