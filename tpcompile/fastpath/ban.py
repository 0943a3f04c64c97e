"""Custom ops, Triton kernels, passes and backends of a program -> which are refused under tensor parallelism, and why.

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
from pydantic import TypeAdapter

from tpcompile.evidence.iterables import find
from tpcompile.evidence.layers.environment import SOURCE_OF
from tpcompile.evidence.layers.kernels import SOURCE
from tpcompile.evidence.records import CompileRecord, Frozen, Item, Kernel
from tpcompile.fastpath.certificate import uncertified
from tpcompile.fastpath.registry import registered
from tpcompile.fastpath.use import Seen, Use, uses

_PACKAGES = Path(__file__).with_name("single_gpu.yaml")


class SingleGpuPackage(Frozen):
    """A published package whose kernels take a shard for the whole tensor."""

    package: str
    version: str
    """The version that was looked at."""
    names: tuple[str, ...]
    """Patterns of its ops (`namespace::op`) and Triton kernels (`module.function`)."""
    reason: str

    def has(self, name: str) -> bool:
        """True for an op or kernel of the package."""
        return any(fnmatchcase(name, pattern) for pattern in self.names)


@dataclass(frozen=True)
class Judged:
    """Outcome for each custom op and kernel of a program."""

    refused: tuple[Item, ...] = ()
    statuses: tuple[tuple[str, str], ...] = ()
    """Name of each fast path, custom op, kernel, pass or backend -> `used`, `declared: what`, `refused: why` or
    `not applicable: why`."""
    uses: tuple[Use, ...] = ()
    """All that were judged."""


def judge(found: Iterable[Item], *, tp_size: int, declared: Collection[str], seen: Seen | None = None) -> Judged:
    """Decide on each op or kernel that graphs call. `declared` names those that the user vouches for.

    With `tp_size` 1 nothing is refused: there are no shards.
    """
    seen = seen or Seen()
    refused: dict[str, Item] = {}
    statuses = dict.fromkeys(registered(), "not applicable: no compiled graph calls it")
    allowed: dict[str, str] = {}
    forbidden: dict[str, str] = {}
    all_uses = tuple(uses(found, seen))
    for use in all_uses:
        why = "" if tp_size == 1 else refusal(use, declared, tp_size=tp_size)
        if why:
            notes = {**use.item.notes, "why": why, "defined": use.defined_at(seen.kernels)}
            refused.setdefault(use.name, use.item.model_copy(update={"notes": notes, "line": use.line}))
            forbidden[_label(use)] = f"refused: {why}"
        else:
            status = "used"
            if tp_size > 1 and _is_declared(use, declared):  # it runs because the user vouches for it
                how = use.item.notes.get("how") or f"called at {use.line}"
                status = f"declared: {how}, defined at {use.defined_at(seen.kernels)}"
            allowed.setdefault(_label(use), status)
    statuses |= allowed | forbidden
    return Judged(tuple(refused.values()), tuple(sorted(statuses.items())), all_uses)


def refusal(use: Use, declared: Collection[str], *, tp_size: int | None = None) -> str:
    """Why an op or kernel may not run on the shards of `tp_size` ranks, None for any; empty when it may."""
    if _is_declared(use, declared):
        return ""
    path = use.path
    if path is not None and not path.is_tp_aware:
        return f"fast path {path.name} is declared tp={path.tp}, at {path.line}"
    if path is not None:
        return uncertified(path, tp=tp_size)
    known = find(single_gpu_packages(), lambda package: package.has(use.name))
    if known is not None:
        return f"{known.package} (looked at in {known.version}): {known.reason}"
    sharing = [path.name for path in registered().values() if use.name in path.names]
    if sharing:
        return f"it is launched outside of the fast path that it is part of ({', '.join(sharing)})"
    return use.item.notes.get("reason", "it is not registered as a fast path")


def _is_declared(use: Use, declared: Collection[str]) -> bool:
    names = {use.name, use.name.rpartition(".")[2]}
    return not names.isdisjoint(declared)


def sources(used: Iterable[Use], kernels: Mapping[str, str]) -> dict[str, str]:
    """`source of NAME` -> hash, of the fast paths and Triton kernels that graphs call: equal on ranks that agree.

    `kernels` has the hashes of the kernels by name.
    """
    hashes = {}
    for use in used:
        sha256 = kernels.get(use.name, "")
        if use.path is not None:
            sha256 = use.path.source.sha256
        if sha256:
            hashes[f"{SOURCE_OF}{_label(use)}"] = sha256
    return hashes


def with_sources(compile_: CompileRecord, used: Iterable[Use], kernels: Mapping[str, str]) -> CompileRecord:
    """The compile with the same hashes before its generated code, which does not show the kernels of custom ops.

    `used` are its own. A compile whose generated code was not seen is left as it is.
    """
    if not compile_.kernels:
        return compile_
    hashed: dict[Kernel, None] = {}
    for use in used:
        phase = "backward" if use.item.notes.get("graph") == "backward" else "forward"
        for name, sha256 in sources([use], kernels).items():
            hashed[Kernel(phase=phase, name=name, kind=SOURCE, code=sha256)] = None
    ordered = sorted(hashed, key=lambda kernel: (kernel.phase, kernel.name))
    return compile_.model_copy(update={"kernels": (*ordered, *compile_.kernels)})


@cache
def single_gpu_packages() -> tuple[SingleGpuPackage, ...]:
    """The list that ships with tpcompile."""
    listed = TypeAdapter(tuple[SingleGpuPackage, ...])
    return listed.validate_python(yaml.safe_load(_PACKAGES.read_text()))


def _label(use: Use) -> str:
    path = use.path
    return path.name if path else use.name
