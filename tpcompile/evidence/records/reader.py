"""A JSON file -> its value or its record; of any other file, one line that says which file it is and what is wrong.

Every record that is read from disk passes here: it may be a folder, a pipe, cut, edited, or not ours.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from tpcompile.errors import REFUSED_BY_MACHINE, ConfigError, PreflightError
from tpcompile.evidence.shortened import shortened

MAX_BYTES = 1 << 28
"""Largest file that is read; the record of one rank has a few MB."""
_MAX_SHOWN = 200
"""Characters of what is wrong with a file."""
R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


def read_json(path: Path) -> Any:
    """The value in a file. Raises FileNotFoundError, ConfigError, and PreflightError where it may not be read."""
    data = _bytes_of(path)
    try:
        return value_of(data.decode())
    except UnicodeError:
        raise damaged(path, "it is not text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise damaged(path, f"it is not JSON: {error}") from None
    except RecursionError:
        raise damaged(path, "its JSON is nested too deeply") from None
    except ValueError:
        raise damaged(path, "it holds a number with too many digits") from None


def value_of(text: str) -> Any:
    """The value of JSON text. Raises what `json.loads` raises, and UnicodeError for half of a surrogate pair.

    That could be read, and never be written, printed or hashed.
    """
    value = json.loads(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file. Raises what `read_json` raises."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise damaged(path, f"it holds {_KINDS.get(type(value), 'a value')}, not an object")
    return value


def read_record(model: type[R], path: Path) -> R:
    """The record in a file. Raises what `read_json` raises."""
    return validated(model, read_object(path), path)


def validated(model: type[T], value: object, path: Path) -> T:
    """What was read from the file, as that model. Raises ConfigError."""
    try:
        return TypeAdapter(model).validate_python(value, strict=False)
    except ValidationError as error:
        name = getattr(model, "__name__", "record").lower()
        raise damaged(path, f"as a {name}, {first_error(error)}") from None
    except RecursionError:
        raise damaged(path, "its JSON is nested too deeply") from None


def first_error(error: ValidationError) -> str:
    """The first error: the field, and what is wrong there."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, found["loc"]))
    return f"{where}: {found['msg']}" if where else found["msg"]


def damaged(path: Path, why: str) -> ConfigError:
    """The error for a file that is not what it should be."""
    return ConfigError(f"{path} is damaged: {shown(why)}")


def shown(value: object) -> str:
    """What a file holds, for the reader: its text in one line, without the middle where it is long."""
    return shortened(str(value), at_most=_MAX_SHOWN).replace("\n", "\\n")


_KINDS: dict[type, str] = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a truth value",
    type(None): "null",
}


def _bytes_of(path: Path) -> bytes:
    """All of a file; a pipe without a writer would never be opened, and a device never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:  # also where its folder was replaced
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
    except (OSError, ValueError) as error:
        raise _unopened(path, error) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
            raise ConfigError(f"{path} is {kind}, not a file")
        if status.st_size > MAX_BYTES:
            size = f"{status.st_size:,} bytes"
            raise ConfigError(f"{path} has {size}; records have at most {MAX_BYTES:,}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_BYTES)
    except OSError as error:
        raise _unopened(path, error) from None
    finally:
        os.close(descriptor)


def _unopened(path: Path, error: OSError | ValueError) -> ConfigError | PreflightError:
    if not isinstance(error, OSError):
        return ConfigError(f"{path!s} is no path: {error}")
    text = f"cannot read {path}: {error.strerror}"
    return PreflightError(text) if error.errno in REFUSED_BY_MACHINE else ConfigError(text)
