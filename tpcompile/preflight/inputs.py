"""Inputs of one call on the ranks of a group -> verdict: bit-equal, or the first argument and element that differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.records import Divergence, Frozen, Layer, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.ranks import exact_ranks
from tpcompile.preflight.conclusion import MAX_NAMED, Groups, Kind, conclude, difference, group_check, reported
from tpcompile.preflight.fact_exchange import Details, Exchanges
from tpcompile.preflight.fingerprint import bits, describe, local_of
from tpcompile.preflight.handshake import group_of
from tpcompile.preflight.locate import Question, answer_elements, located
from tpcompile.preflight.weights import Group, Layout, layout_by_dtensor
from tpcompile.ranks.exchange import Fetch, Side
from tpcompile.report.verdict import ShownVerdict

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, range, slice)


def named_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(name, leaf) of an argument, in order; descends into lists, tuples, dicts and dataclasses."""
    if isinstance(value, (torch.Size, Tensor)):
        yield name, value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from named_leaves(f"{name}[{key!r}]", child)
    elif isinstance(value, (list, tuple)):
        yield f"len({name})", len(value)
        for index, child in enumerate(value):
            yield from named_leaves(f"{name}[{index}]", child)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from named_leaves(f"{name}.{field.name}", getattr(value, field.name))
    else:
        yield name, value


def aspects_of(name: str, leaf: Any, group: Group, sharded: Iterable[str]) -> dict[str, str]:
    """Aspects that must be equal: metadata and bits of a tensor, metadata of a shard, value or class of the rest."""
    if not isinstance(leaf, Tensor):
        text = repr(leaf) if isinstance(leaf, _PLAIN) else f"a {type(leaf).__module__}.{type(leaf).__qualname__}"
        return {"value": normalise.device(normalise.objects(text))}
    said = layout_by_dtensor(leaf, group)
    is_sharded_dtensor = said is not None and said.layout == Layout.SHARDED
    local = local_of(leaf)
    kind = type(leaf).__qualname__
    if isinstance(leaf, DTensor):
        kind += f" {leaf.placements}"
    aspects = {"class": kind, "dtype": str(leaf.dtype), "dims": str(leaf.dim())}
    aspects["requires_grad"] = str(leaf.requires_grad)
    if is_sharded_dtensor or any(fnmatchcase(name, pattern) for pattern in sharded):
        return aspects
    layout = str(list(local.stride())) if local.layout == torch.strided else str(local.layout)
    device = f"on {local.device.type}"
    return aspects | {
        "shape": str(list(local.shape)),
        "stride": f"{layout} {device}",
        "bits": f"{describe(local)} {bits(local)}",
    }


_PASSED = ""
"""The aspect that every passed argument has."""
_KINDS = {
    _PASSED: Kind(Layer.INPUTS, Cause.UNKNOWN, missing="not passed"),
    "class": Kind(Layer.INPUTS, Cause.TENSOR_SUBCLASS),
    "dtype": Kind(Layer.INPUTS, Cause.DTYPE),
    "shape": Kind(Layer.INPUTS, Cause.SHAPE),
    "dims": Kind(Layer.INPUTS, Cause.SHAPE),
    "stride": Kind(Layer.INPUTS, Cause.STRIDE),
    "requires_grad": Kind(Layer.INPUTS, Cause.REQUIRES_GRAD),
    "bits": Kind(Layer.INPUTS, Cause.INPUT_VALUES),
    "value": Kind(Layer.INPUTS, Cause.PYTHON_VALUE),
}
"""Aspects of an argument, metadata before content; JSON does not keep their order."""
_STEP = Kind(Layer.INPUTS, Cause.UNKNOWN)


class InputFacts(Frozen):
    """Arguments of one call."""

    step: int | None
    names: tuple[str, ...]
    """Names of the arguments, in the order of the call."""
    aspects: dict[str, dict[str, str]]
    """Name -> aspect (`shape`, `dtype`, `bits`, ...) -> text."""


class _Digest(Frozen):
    sha: str


class InputCheck:
    """Compares the inputs of single calls among the ranks of a group.

    All arguments must be bit-equal, except sharded DTensors and those whose name matches a pattern of `sharded`: of
    these only class, dtype, number of dims and requires_grad are compared. Names are `args[0]` or the keyword, inside
    containers `batch['tokens']`. Costs a hash of every tensor and a few store operations a call; no collective.
    `mesh`, `axis`, `store` and `timeout_s` as in `check_setup`.
    """

    def __init__(
        self,
        *,
        mesh: DeviceMesh | None = None,
        axis: str = "tp",
        store: dist.Store | None = None,
        timeout_s: float = 60.0,
        sharded: Iterable[str] = (),
    ) -> None:
        self._group, self._sharded, self._timeout_s = group_of(mesh, axis), tuple(sharded), timeout_s
        self._exchanges = Exchanges("inputs", ranks=self._group.ranks, store=store, timeout_s=timeout_s)

    def check(self, *args: Any, step: int | None = None, **kwargs: Any) -> ShownVerdict:
        """Compare the arguments of one call; every rank of the group calls it and gets the verdict.

        Raises DivergenceError when the judging rank stops responding; a rank that does not arrive is a failed check.
        """
        of_step = "" if step is None else f" of step {step}"
        self._exchanges.publish_state(f"hashing the inputs{of_step}")
        leaves: dict[str, Any] = {}
        for name, value in [*((f"args[{index}]", value) for index, value in enumerate(args)), *kwargs.items()]:
            leaves |= named_leaves(name, value)
        aspects = {name: aspects_of(name, leaf, self._group, self._sharded) for name, leaf in leaves.items()}
        passed = {name: {_PASSED: "passed", **found} for name, found in aspects.items()}
        facts = InputFacts(step=step, names=tuple(leaves), aspects=passed)

        def judge(found: dict[int, _Digest], absent: dict[int, str], fetch: Fetch) -> Verdict:
            shas = {rank: digest.sha for rank, digest in found.items()}
            return _judge(shas, absent, fetch, own=facts, timeout_s=self._timeout_s, axis=self._group.axis)

        def answer(question: Question) -> Any:
            if not question.elements:
                return facts.model_dump(mode="json")
            tensor = leaves.get(question.elements)
            return answer_elements(tensor if isinstance(tensor, Tensor) else None, question)

        digest = _Digest(sha=hashlib.sha256(facts.to_json().encode()).hexdigest())
        side = Side(digest.model_dump(mode="json"), answer, judge, kind=_Digest, question=Question)
        return self._exchanges.verdict(side)


def _judge(
    shas: Mapping[int, str], absent: Mapping[int, str], fetch: Fetch, *, own: InputFacts, timeout_s: float, axis: str
) -> Verdict:
    ranks = sorted({*shas, *absent})
    domain = f"{axis} {exact_ranks(ranks)}"
    facts = Details(fetch, {}, shas, InputFacts).of(shas)
    silent = sorted(set(shas).difference(facts))
    found: list[Divergence] = []
    names: list[str] = []
    steps = facts.map(lambda own: own.step)
    if steps.differ():
        found.append(difference("step", steps.map(str).sides(), kind=_STEP, domain=domain))
    else:
        rows = _rows(facts)
        names = [row.name for row in rows]
        for row in rows[:MAX_NAMED]:
            is_located = row.aspect == "bits" and not found  # the first element is searched once a call: it asks ranks
            at = located(fetch, row.groups, row.name) if is_located else ""
            title = f"input {row.name} {row.aspect}".strip()
            kind = _KINDS[row.aspect]
            found.append(difference(title, row.groups, kind=kind, domain=domain, found=at, step=own.step))
    checks = [
        reported(len(shas), absent, timeout_s=timeout_s, silent=silent),
        group_check("inputs", found, names, len(own.names)),
    ]
    domains = {domain: ByRank(shas).groups()}
    return conclude(checks, found, world_size=len(ranks), title="preflight inputs", domains=domains)


@dataclass(frozen=True)
class _Row:
    name: str
    aspect: str
    """The first aspect that differs."""
    groups: Groups


def _rows(facts: ByRank[InputFacts]) -> list[_Row]:
    names: dict[str, None] = {}  # an ordered set
    for own in facts.values():
        names |= dict.fromkeys(own.names)
    found = []
    for name in names:
        for aspect in _KINDS:
            texts = ByRank({rank: own.aspects.get(name, {}).get(aspect) for rank, own in facts.items()})
            if texts.differ():
                found.append(_Row(name, aspect, texts.sides()))
                break
    return found
