"""Records of this package <-> JSON files; every write is atomic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tpcompile.errors import ConfigError, PreflightError
from tpcompile.evidence.records.base import Frozen
from tpcompile.evidence.records.reader import read_object, shown, validated

R = TypeVar("R", bound=Frozen)


def write(record: Frozen, path: Path) -> None:
    """Write JSON, equal text for equal records. Raises PreflightError for a file that cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        partial.write_text(record.to_json(indent=1) + "\n")
        partial.replace(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """One line, and not a stack, where the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise PreflightError(f"cannot write {path}: {error.strerror or error}") from None


def read(model: type[R], path: Path, *, version: int, made_by: str) -> R:
    """Raises ConfigError for a file that is not there, is no such record, or has a different schema version."""
    try:
        fields = read_object(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}; `{made_by}` writes one") from None
    found = fields.get("schema_version")
    if found != version:
        raise ConfigError(
            f"{path} has schema version {shown(found)}, and this reads {version}; make it again with `{made_by}`"
        )
    return validated(model, fields, path)
