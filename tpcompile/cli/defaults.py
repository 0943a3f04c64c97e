"""`--config FILE`, else `[tool.tpcompile]` of the nearest pyproject.toml -> defaults of the gate's flags."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tpcompile.errors import ConfigError
from tpcompile.request import GateRequest, flags_of

_PYPROJECT = "pyproject.toml"
_WORDS = {bool: "true or false", int: "an integer", float: "a number"}


def defaults(file: Path | None, folder: Path) -> dict[str, Any]:
    """Field of `GateRequest` -> its default, from `file`, else from a pyproject.toml in `folder` or above it.

    Keys are the flags without their dashes. A pyproject.toml is read at `[tool.tpcompile]`, any other file at its top
    level. Raises ConfigError, in one line, for a file that cannot be read, an unknown key, or a value of a wrong type.
    """
    if file is None:
        above = [parent / _PYPROJECT for parent in (folder, *folder.parents)]
        projects = [path for path in above if path.is_file()]
    elif file.name == _PYPROJECT:
        projects = [file]
    else:
        return _checked(_read(file), str(file))
    for path in projects:
        tool = _read(path).get("tool", {})
        section = tool.get("tpcompile") if isinstance(tool, dict) else None
        if section is not None and not isinstance(section, dict):
            raise ConfigError(f"{path}: tool.tpcompile must be a table")
        if section is not None:
            return _checked(section, f"{path} [tool.tpcompile]")
    return {}


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _checked(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = {flag.spelling.removeprefix("--"): (field.name, kind) for field, kind, flag in flags_of(GateRequest)}
    found = {}
    for key, value in given.items():
        name = key.replace("_", "-")
        if name not in known:
            choices = ", ".join(sorted(known))
            raise ConfigError(f"{where}: unknown key {key!r}; choose from {choices}")
        field, kind = known[name]
        is_valid, advice = _check(value, kind)
        if not is_valid:
            given_text = f"{key} = {value!r}"
            raise ConfigError(f"{where}: {given_text}: {advice}")
        found[field] = value
    return found


def _check(value: Any, kind: Any) -> tuple[bool, str]:
    """True where the value is of that kind, as a flag would have it; and what to write otherwise."""
    if get_origin(kind) is Literal:
        choices = _choices(kind)
        return value in choices, f"choose from {', '.join(choices)}"
    if get_origin(kind) is list:
        are_strings = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return are_strings, 'write a list of strings, e.g. ["block.seq_len=64"]'
    wanted = kind if kind in _WORDS else str
    accepted = (float, int) if wanted is float else (wanted,)
    return type(value) in accepted, f"must be {_WORDS.get(wanted, 'a string')}"


def _choices(kind: Any) -> list[str]:
    """The values of a Literal, those of Literals within it as well."""
    found: list[str] = []
    for one in get_args(kind):
        found += [one] if isinstance(one, str) else _choices(one)
    return found
