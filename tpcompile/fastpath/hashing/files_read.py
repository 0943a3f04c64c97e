"""Names of files -> texts without where they are installed; expression of a name -> the file, if constants make it."""

from __future__ import annotations

import ast
import hashlib
import os
import pathlib
from collections.abc import Callable, Collection
from pathlib import Path, PurePath
from typing import Any

from tpcompile.evidence.iterables import first

_HARMLESS = frozenset(map(id, (
    os, os.path, pathlib, Path, PurePath, str,
    os.fspath, os.path.join, os.path.dirname, os.path.abspath, os.path.realpath,
)))  # fmt: skip
_PLAIN = (str, PurePath, int, list, tuple)
_ATTRIBUTES = frozenset({
    "path", "join", "dirname", "abspath", "realpath", "parent", "parents", "with_name", "with_suffix", "joinpath",
    "resolve", "absolute", "as_posix", "fspath", "Path", "PurePath",
})  # fmt: skip
"""None of them changes anything."""
_BUILDS = "torch.utils.cpp_extension.load"
_OPENS = {
    "io.open": 1, "_io.open": 1, "_io.FileIO": 1, "posix.open": 1, "codecs.open": 1, "gzip.open": 1, "bz2.open": 1,
    "lzma.open": 1, "zipfile.ZipFile": 1, "numpy.memmap": 2,
}  # fmt: skip
"""Functions that open a file to read or to write it -> which argument is the mode."""
_READS = frozenset({
    *_OPENS, "torch.serialization.load", "numpy.load", "numpy.fromfile", "numpy.loadtxt", "numpy.genfromtxt",
    "linecache.getline", "linecache.getlines", "ctypes.CDLL", "runpy.run_path", _BUILDS,
})  # fmt: skip
"""Functions that read the file that they are given."""
_LOADS = frozenset({"LoadLibrary", "load_library"})
"""Methods that do."""
_READ_METHODS = frozenset({"read_text", "read_bytes"})
_ARGUMENTS = ("sources", "file", "f", "fname", "filename", "name")
_READS_ANY = ("importlib.resources.", "importlib_resources.", "pkgutil.get_data", "configparser.", "subprocess.")
"""What may read files that no argument names by itself."""


def portable(text: str, roots: Collection[str]) -> str:
    """The text with `<root>` in place of the folders that programs are installed in."""
    for root in sorted(roots, key=len, reverse=True):
        if len(root) > 1:
            text = text.replace(root, "<root>")
    return text


def path_text(value: str | PurePath, roots: Collection[str]) -> str:
    """A string or path, as in `portable`; with the contents of a data file of the program that it names."""
    text = str(value)
    shown = portable(text, roots)
    file = Path(text)
    is_of_program = shown != text and "\n" not in text
    is_code = file.suffix in (".py", ".pyc")
    if is_of_program and not is_code and file.is_file():
        return f"{shown!r} {content(file)}"
    return repr(shown)


def content(file: Path) -> str:
    """Hash of what a file holds."""
    try:
        return f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}"
    except OSError:
        return "sha256 of no file"


def file_of_call(node: ast.Call, called: str) -> ast.expr | None:
    """The expression of the file that a call reads, the call itself where it is given in parts; None if it reads none.

    `called` is the name of the function, empty for a method of a value.
    """
    if called.startswith(_READS_ANY):
        return node
    method, owner = "", None
    if isinstance(node.func, ast.Attribute):
        method, owner = node.func.attr, node.func.value
    arguments = {keyword.arg: keyword.value for keyword in node.keywords}
    if called in _READS or method in _LOADS:
        named = [arguments[name] for name in _ARGUMENTS if name in arguments]
        file = first([*named, *node.args[called == _BUILDS :]])  # an extension's name comes before its files
        mode_at = _OPENS.get(called)
    elif method in _READ_METHODS or (method == "open" and not called):  # with a name it is a function
        file, mode_at = owner, 0
    else:
        return None
    mode = None if mode_at is None else arguments.get("mode", first(node.args[mode_at:]))
    is_written = isinstance(mode, ast.Constant) and set("wax") & set(str(mode.value))
    return None if is_written else file


ValueOf = Callable[[ast.AST], Any]
Assigned = Callable[[str], ast.expr | None]


def paths_of(node: ast.expr, value_of: ValueOf, assigned: Assigned) -> list[Path] | None:
    """The files that an expression names; None where it depends on more than constants.

    `value_of` has the value of a name from outside of the function, None where it has none; `assigned` the expression
    of a local variable that is assigned once.
    """
    try:
        found = _value(node, value_of, assigned)
        every = found if isinstance(found, list | tuple) else [found]
        return [Path(one) for one in every]
    except Exception:  # what it raises in the launcher, or variables that are made of each other
        return None


def _value(node: ast.expr, value_of: ValueOf, assigned: Assigned) -> Any:
    """The value of an expression that reads and changes nothing; raises ValueError for others."""
    text = ast.unparse(node)
    values = {}
    for inner in ast.walk(node):
        is_harmless = True
        if isinstance(inner, ast.Attribute):
            is_harmless = inner.attr in _ATTRIBUTES
        elif isinstance(inner, ast.Name):
            expression = assigned(inner.id)
            value = _value(expression, value_of, assigned) if expression else value_of(inner)
            values[inner.id] = value
            is_harmless = isinstance(value, _PLAIN) or id(value) in _HARMLESS
        if not is_harmless:
            raise ValueError(text)
    return eval(compile(text, "<path>", "eval"), {"__builtins__": {}}, values)
