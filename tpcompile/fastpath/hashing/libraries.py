"""Module -> whether it is the program's own, which counts by its source, or a library, which counts by its version."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

_ALWAYS = frozenset({"torch", "triton", "numpy", "functorch", "torchgen", "tpcompile", "builtins", "__builtin__"})
"""Libraries wherever they are installed from: a source checkout of them is one too."""
_INSTALLED = ("/site-packages/", "/dist-packages/")
PLATFORM = frozenset({"torch", "triton", "functorch", "torchgen"})
"""What a certificate names in fields of its own."""


def top_of(module: str | None) -> str:
    """Top-level package; `__main__` for code that was executed without a module."""
    return (module or "__main__").partition(".")[0]


def is_library(module: str, own: str) -> bool:
    """Whether a module is of a library for a launcher whose top-level package is `own`.

    Modules that are neither installed nor of the standard library belong to the program, whatever their package.
    """
    top = top_of(module)
    if top in (own, "__main__"):
        return False
    if top in _ALWAYS or top in sys.stdlib_module_names:
        return True
    is_in_site = any(folder in _place(module, top) for folder in _INSTALLED)
    return is_in_site or _is_installed(top)


@cache
def _is_installed(top: str) -> bool:
    """True for a package whose files an installer has put anywhere, as `pip install --target` does; not for a link."""
    try:
        files = metadata.files(top) or []
    except metadata.PackageNotFoundError:
        return False
    return any(file.parts[0] in (top, f"{top}.py") for file in files)


def _place(module: str, top: str) -> str:
    """Where a module or its package is, without importing it; empty where that is not known."""
    found = sys.modules.get(module) or sys.modules.get(top)
    if found is not None:
        return str(getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", [])), ""))
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    return str(spec.origin or "") if spec else ""


def is_standard(module: str) -> bool:
    """Whether it is of the standard library."""
    top = top_of(module)
    return top in sys.stdlib_module_names or top in ("builtins", "__builtin__")


def version_of(top: str) -> str:
    """Of the distribution that a top-level package is from; `unknown` where neither it nor the package says."""
    try:
        return metadata.version(top)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(top), "__version__", "unknown"))


def roots_of(module: ModuleType | None, file: str) -> set[str]:
    """The folder that a module's top-level package or module lies in: what depends on where it is installed."""
    top = sys.modules.get(top_of(module.__name__)) if module else None
    folders = list(getattr(top, "__path__", []))
    place = Path(folders[0]) if folders else Path(file)
    return {str(place.parent), str(place.resolve().parent)}
