"""Names of files -> texts without where they are installed; expression of a name -> the file, if constants make it."""

from __future__ import annotations

import ast
import hashlib
import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

_CALLED = (Path, pathlib.PurePath, str, os.fspath, os.path.join, os.path.dirname, os.path.abspath, os.path.realpath)
_ATTRIBUTES = frozenset({
    "path", "join", "dirname", "abspath", "realpath", "parent", "parents", "with_name", "with_suffix", "joinpath",
    "resolve", "absolute", "as_posix", "fspath", "Path", "PurePath",
})  # fmt: skip
"""None of them changes anything."""
_NODES = (
    ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.BinOp, ast.Div, ast.Add, ast.JoinedStr, ast.FormattedValue,
    ast.List, ast.Tuple, ast.Subscript, ast.UnaryOp, ast.USub, ast.Load,
)  # fmt: skip
_PLAIN = str | PurePath | int | list | tuple


@dataclass
class Places:
    """Texts without the folders that programs are installed in."""

    roots: set[str] = field(default_factory=set)

    def portable(self, text: str) -> str:
        """The text with `<root>` in place of such a folder."""
        for root in sorted(self.roots, key=len, reverse=True):
            if len(root) > 1:
                text = text.replace(root, "<root>")
        return text

    def text(self, value: str | PurePath) -> str:
        """A string or path; with the contents of a data file of the program that it names."""
        text, portable = str(value), self.portable(str(value))
        is_data = portable != text and "\n" not in text and not text.endswith((".py", ".pyc"))
        read = f" {content(Path(text))}" if is_data and Path(text).is_file() else ""
        return f"{portable!r}{read}"


def content(file: Path) -> str:
    """Hash of what a file holds."""
    try:
        return f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}"
    except OSError:
        return "sha256 of no file"


def paths_of(
    node: ast.expr, value_of: Callable[[str], Any], assigned: Callable[[str], ast.expr | None]
) -> list[Path] | None:
    """The files that an expression names; None where it depends on more than constants.

    `value_of` has the value of a name from outside of the function, None where it has none; `assigned` the expression
    of a local variable that is assigned once.
    """
    inlined = _Inlined(assigned).visit(ast.parse(ast.unparse(node), mode="eval"))
    if not all(isinstance(each, _NODES) for each in ast.walk(inlined.body)):
        return None
    values = {each.id: value_of(each.id) for each in ast.walk(inlined) if isinstance(each, ast.Name)}
    attributes = {each.attr for each in ast.walk(inlined) if isinstance(each, ast.Attribute)}
    if not attributes <= _ATTRIBUTES or not all(map(_is_harmless, values.values())):
        return None
    try:
        found = eval(compile(ast.fix_missing_locations(inlined), "<path>", "eval"), {"__builtins__": {}}, values)
    except Exception:  # whatever it raises, it would raise in the launcher
        return None
    every = found if isinstance(found, list | tuple) else [found]
    if not all(isinstance(one, str | PurePath) for one in every):
        return None
    return [Path(one) for one in every]


def _is_harmless(value: Any) -> bool:
    return isinstance(value, _PLAIN) or value in (os, os.path, pathlib) or any(value is called for called in _CALLED)


class _Inlined(ast.NodeTransformer):
    """With the expressions of local variables in their places."""

    def __init__(self, assigned: Callable[[str], ast.expr | None]) -> None:
        self._assigned = assigned
        self._inside: list[str] = []

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """One local variable."""
        expression = self._assigned(node.id)
        if expression is None or node.id in self._inside:
            return node
        self._inside.append(node.id)
        inlined = self.visit(ast.parse(ast.unparse(expression), mode="eval").body)
        self._inside.pop()
        return inlined
