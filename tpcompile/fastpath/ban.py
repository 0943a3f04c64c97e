"""Custom ops and Triton kernels of a program -> which are refused under tensor parallelism, and why.

Denied by default: a fused kernel that sees one shard computes a local mean where a global one was meant, and digests
cannot show it, because the result is wrong in the same way on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from tpcompile.evidence.layers.environment import SOURCE_OF
from tpcompile.evidence.records import Item
from tpcompile.fastpath.certificate import uncertified
from tpcompile.fastpath.registry import FastPath, registered

_PACKAGES = Path(__file__).with_name("single_gpu.yaml")


class SingleGpuPackage(BaseModel):
    """A published package whose kernels take a shard for the whole tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str
    version: str
    """The version that was looked at."""
    names: tuple[str, ...]
    """Patterns of its ops (`namespace::op`) and Triton kernels (`module.function`)."""
    reason: str


@dataclass(frozen=True)
class Judged:
    """What became of the custom ops and kernels of a program."""

    refused: tuple[Item, ...] = ()
    statuses: tuple[tuple[str, str], ...] = ()
    """Name of each fast path, custom op or kernel -> `used`, `refused: why` or `not applicable: why`."""


def judge(found: Iterable[Item], *, tp_size: int, declared: Collection[str]) -> Judged:
    """Decide on each op or kernel that graphs call. `declared` names those that the user vouches for.

    With `tp_size` 1 nothing is refused: there are no shards.
    """
    refused: list[Item] = []
    statuses: dict[str, str] = {}
    for item in found:
        why = "" if tp_size == 1 else refusal(item.about, declared)
        if why:
            refused.append(item.model_copy(update={"notes": {**item.notes, "why": why}}))
            statuses[_label(item.about)] = f"refused: {why}"
        else:
            statuses.setdefault(_label(item.about), "used")
    for name in registered():
        statuses.setdefault(name, "not applicable: no compiled graph calls it")
    return Judged(tuple(refused), tuple(sorted(statuses.items())))


def refusal(name: str, declared: Collection[str]) -> str:
    """Why an op or kernel may not run on a shard; empty when it may."""
    if not {name, name.rpartition(".")[2]}.isdisjoint(declared):
        return ""
    path = owner(name)
    if path is not None:
        return (
            uncertified(path) if path.is_tp_aware else f"fast path {path.name} is declared tp={path.tp}, at {path.line}"
        )
    for known in single_gpu_packages():
        if any(fnmatchcase(name, pattern) for pattern in known.names):
            return f"{known.package} (looked at in {known.version}): {known.reason}"
    return "it is not registered as a fast path"


def owner(name: str) -> FastPath | None:
    """The fast path that this op or kernel belongs to, a TP-aware one first."""
    owners = [path for path in registered().values() if name in path.names]
    return max(owners, key=lambda path: path.is_tp_aware, default=None)


def sources(found: Iterable[Item], kernels: Mapping[str, str]) -> dict[str, str]:
    """`source of NAME` -> hash, of the fast paths and Triton kernels that graphs call: equal on ranks that agree.

    `kernels` has the hashes of the kernels by name.
    """
    hashes = {}
    for item in found:
        path = owner(item.about)
        sha256 = path.source.sha256 if path else kernels.get(item.about, "")
        if sha256:
            hashes[f"{SOURCE_OF}{_label(item.about)}"] = sha256
    return hashes


@cache
def single_gpu_packages() -> tuple[SingleGpuPackage, ...]:
    """The list that ships with tpcompile."""
    listed = TypeAdapter(tuple[SingleGpuPackage, ...])
    return listed.validate_python(yaml.safe_load(_PACKAGES.read_text()))


def _label(name: str) -> str:
    path = owner(name)
    return path.name if path else name
