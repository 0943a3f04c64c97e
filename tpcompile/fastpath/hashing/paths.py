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

from tpcompile.evidence.iterables import first

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
_READS = frozenset({
    "io.open", "_io.open", "posix.open", "codecs.open", "gzip.open", "torch.serialization.load", "numpy.load",
    "numpy.fromfile", "numpy.loadtxt", "numpy.genfromtxt", "numpy.memmap", "ctypes.CDLL", "runpy.run_path",
    "torch.utils.cpp_extension.load",
})  # fmt: skip
"""Functions that read a file."""
_READ_METHODS = frozenset({"read_text", "read_bytes", "LoadLibrary", "load_library"})
_READ_RESOURCES = ("importlib.resources.", "importlib_resources.", "pkgutil.get_data")
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


def reads_file(node: ast.Call, called: str) -> bool:
    """Whether a call reads a file; `called` is the name of the function, empty for a method of a value."""
    method = _method(node)
    if method in _READ_METHODS:
        return True
    if method == "open" and not called:
        return not _is_written(node, at=0)
    is_read = called in _READS or called.startswith(_READ_RESOURCES)
    return is_read and not _is_written(node, at=1)


def file_of_call(node: ast.Call, called: str) -> ast.expr | None:
    """The expression of the file that such a call reads; None where it is given in parts."""
    method = _method(node)
    if method.startswith("read_") or (method == "open" and not called):
        return node.func.value  # type: ignore[attr-defined]  # a method's
    if called.startswith(_READ_RESOURCES):
        return None
    is_built = called == "torch.utils.cpp_extension.load"
    names = ("sources",) if is_built else ("file", "f", "fname", "filename", "name")
    by_name = [keyword.value for keyword in node.keywords if keyword.arg in names]
    by_place = node.args[1:] if is_built else node.args
    return first([*by_name, *by_place])


def _method(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _is_written(node: ast.Call, *, at: int) -> bool:
    modes = [*node.args[at : at + 1], *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
    return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax") for mode in modes)


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
