"""Bytes that a peer wrote -> a record: the one reader, and the types that bound what is in it.

Whoever reaches the job's store can write any key. A value is used only when it has the type that is expected there, no
more than `MAX_BYTES`, ranks of this job, and the rank of its key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, ValidationInfo

MAX_BYTES = 8 << 20
"""torch's TCPStore cuts the connection of a client that sends a longer value (2.11 and 2.13)."""
MAX_RANKS = 1 << 17
"""Ranks that a job has at most, 131,072: a larger number in a file or on a command line is a mistake."""
_WORLD_SIZE = "world_size"


def _of_this_job(rank: int, info: ValidationInfo) -> int:
    """The rank, or ValueError; records of this process itself, and those from disk, are read without a job."""
    world_size = (info.context or {}).get(_WORLD_SIZE)
    if world_size is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of a job of {world_size} ranks")
    return rank


Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS), AfterValidator(_of_this_job)]
WorldSize = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Number = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A count, or a number that is counted up."""
Seconds = Annotated[float, Field(allow_inf_nan=False)]


def read(raw: bytes, kind: Any, *, world_size: int, sender: int | None = None) -> Any:
    """JSON of a peer as `kind`, any type that pydantic knows; a record with a rank must have that of the sender.

    Raises ValueError that says, in one line, what is wrong.
    """
    if len(raw) > MAX_BYTES:
        raise ValueError(f"{len(raw)} bytes, more than {MAX_BYTES}")
    return _checked(_adapter(kind).validate_json, raw, world_size, sender)


def checked(value: Any, kind: Any, *, world_size: int, sender: int) -> Any:
    """What a peer sent in parts, put together, as `kind`. Raises what `read` raises."""
    return _checked(_adapter(kind).validate_python, value, world_size, sender)


def _checked(validate: Callable[..., Any], value: Any, world_size: int, sender: int | None) -> Any:
    try:
        found = validate(value, context={_WORLD_SIZE: world_size})
    except ValidationError as error:
        # without the value, which may be anything
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part)[:40] for part in problem["loc"][:8])
        says = problem["msg"][:200]
        raise ValueError(f"{where}: {says}" if where else says) from None
    rank = getattr(found, "rank", sender)
    if sender is not None and rank != sender:
        raise ValueError(f"rank: it says {rank}")
    return found


def typed(value: Any, kind: Any) -> Any:
    """JSON of this process itself as `kind`."""
    return _adapter(kind).validate_python(value)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
