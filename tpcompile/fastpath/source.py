"""Launcher of a fused kernel -> one hash of all that it runs and reads, wherever it is installed."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

from torch.library import CustomOpDef

from tpcompile.errors import ConfigError
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import UserLine
from tpcompile.fastpath.hashing.effects import Effects, effects_of
from tpcompile.fastpath.hashing.files_read import content
from tpcompile.fastpath.hashing.libraries import PLATFORM, top_of, version_of
from tpcompile.fastpath.hashing.trees import definition_of
from tpcompile.fastpath.hashing.walk import Walk
from tpcompile.torch_api import kernels as torch_kernels

_MOST_WALKS = 5
"""Walks after which the last one counts, should the effects that they find never settle."""


@dataclass(frozen=True)
class Source:
    """The code that a launcher runs, and its hash."""

    sha256: str
    """Hash of the code without comments and layout and of all values that it names, 16 hex digits."""
    kernels: frozenset[str]
    """Names of its Triton kernels, `module.function`."""
    ops: frozenset[str] = frozenset()
    """Names of its custom ops, `namespace::op`."""
    refused: str = ""
    """The first name whose meaning cannot be told from the source, and why; empty when all can."""
    libraries: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Packages that it calls, without torch and Triton -> their versions."""
    compiled: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Names of its Triton kernels -> kernels, which keep what they were compiled to."""
    functions: frozenset[FunctionType] = field(default=frozenset(), compare=False)
    """All Python functions that it runs: the launcher, kernels, helpers and backwards."""


def source_of(launcher: Callable[..., Any], *, reference: Any = None, files: Collection[str] = ()) -> Source:
    """Follow all that a launcher or a Triton kernel runs, to the libraries that it calls.

    `reference` is the plain code with the same result, which it does not run; `files` are what it reads besides those
    that its source names, relative to its own file. Raises ConfigError when the launcher is not a Python function in a
    file, or a declared file is not there.
    """
    function = checked(launcher)
    references = [] if reference is None else [reference]
    # Walk again until two walks find the same effects: what the program changes decides what the walk reads.
    changes = Effects()
    for _ in range(_MOST_WALKS):
        walk = Walk(top_of(function.__module__), changes=changes, is_told=bool(files))
        walk.read(launcher, references)
        known, changes = changes, effects_of(walk.ran)
        if known == changes:
            break
    parts = walk.parts | {f"file {name}": content(file) for name, file in declared(launcher, files).items()}
    text = "\n".join(f"{name}\n{parts[name]}" for name in sorted(parts))
    return Source(
        sha256=hashlib.sha256(text.encode()).hexdigest()[:16],
        kernels=frozenset(walk.kernels),
        ops=frozenset(walk.ops),
        refused=first(walk.refused) or "",
        libraries={top: version_of(top) for top in sorted(walk.libraries - PLATFORM)},
        compiled=walk.kernels,
        functions=frozenset(walk.functions),
    )


def checked(launcher: Callable[..., Any]) -> FunctionType:
    """The Python function of a launcher; ConfigError when there is none, or Python cannot find its source."""
    function = python_function(launcher)
    if function is None:
        raise ConfigError(f"{launcher!r} is not a Python function, nor a Triton kernel or custom op made from one")
    definition_of(function)
    return function


def declared(launcher: Callable[..., Any], files: Collection[str]) -> dict[str, Path]:
    """Files that a launcher is declared to read, by name; ConfigError for one that is not there."""
    folder = Path(checked(launcher).__code__.co_filename).parent
    found = {name: folder / name for name in files}
    for name, file in found.items():
        if not file.is_file():
            raise ConfigError(f"the file {name} is declared to be read, and there is no {file}")
    return found


def python_function(wrapped: Any) -> FunctionType | None:
    """The Python function below Triton's, functools' and torch's wrappers; None when there is none."""
    while not isinstance(wrapped, FunctionType) or hasattr(wrapped, "__wrapped__"):
        if isinstance(wrapped, CustomOpDef):
            wrapped = torch_kernels.custom_op_function(wrapped)
        else:
            wrapped = getattr(wrapped, "fn", getattr(wrapped, "__wrapped__", None))  # Triton's wrappers, functools'
        if wrapped is None:
            return None
    return wrapped


def line_of(function: FunctionType) -> UserLine:
    """File and line of a function."""
    file = inspect.getsourcefile(function) or "?"
    return UserLine(file=file, line=function.__code__.co_firstlineno, function=function.__qualname__)


def kernel_name(function: FunctionType) -> str:
    """Name of a Triton kernel in graphs: `module.function`."""
    return f"{function.__module__}.{function.__name__}"
