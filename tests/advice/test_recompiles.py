"""Each way to avoid a recompile that a report names: a call that recompiles for that reason, and none as advised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.digests.recompiles import ADVICE, recompile_causes
from tpcompile.evidence.records import RecompileCause
from tpcompile.evidence.text.reasons import ReasonKind
from tpcompile.recording import CaptureSession

Call = Callable[[], Any]


@dataclass(frozen=True)
class Way:
    """A program that is called twice: as it is, and as a sentence says."""

    kind: ReasonKind
    number: int
    program: Any
    calls: tuple[Any, Any]
    """What is done with the compiled program, twice."""
    followed: tuple[Any, Any]


def double(x: Tensor) -> Tensor:
    return x * 2


def total(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def first_of(tensors: list[Tensor]) -> Tensor:
    return tensors[0] * len(tensors)


def by_name(tensors: dict[str, Tensor]) -> Tensor:
    return next(iter(tensors.values())) * 2


class Model(nn.Module):
    def __init__(self, k: Any) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        return x * self.k if self.training else x


class Own(Tensor):
    """A tensor class of the user's own."""


def applied(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(x)


def made() -> Callable[[Tensor], Tensor]:
    """A new function object in each call."""
    namespace: dict[str, Any] = {}
    exec("def negative(x):\n    return -x", namespace)
    return namespace["negative"]


NEGATIVE = made()


def given(*arguments: Any) -> Callable[[Any], Any]:
    return lambda compiled: compiled(*arguments)


def changed(**values: Any) -> Callable[[Any], Any]:
    def call(compiled: Any) -> Any:
        vars(compiled._orig_mod).update(values)
        return compiled(torch.ones(3))

    return call


def marked(*shape: int, unbacked: bool = False) -> Callable[[Any], Any]:
    def call(compiled: Any) -> Any:
        x = torch.ones(*shape)
        mark = torch._dynamo.decorators.mark_unbacked if unbacked else torch._dynamo.mark_dynamic
        mark(x, 1)
        return compiled(x)

    return call


def in_inference(*, creates: bool, calls: bool = True) -> Callable[[Any], Any]:
    def call(compiled: Any) -> Any:
        with torch.inference_mode(creates):
            x = torch.ones(3) * 1
        with torch.no_grad():
            return compiled(x)

    return call


def without_grad(compiled: Any) -> Any:
    with torch.no_grad():
        return compiled(torch.ones(3))


T = torch.ones
X = T(4, 8)
KIND = ReasonKind
WAYS = [
    Way(KIND.SIZE, 0, double, (given(X), given(T(4, 9))), (marked(4, 8), given(T(4, 9)))),
    Way(KIND.SIZE, 1, double, (given(X), given(T(4, 7))), (given(X), given(nn.functional.pad(T(4, 7), (0, 1))))),
    Way(KIND.SIZE_BOUND, 0, double, (marked(4, 8), given(T(4, 1))), (marked(4, 8, unbacked=True), given(T(4, 1)))),
    Way(KIND.STRIDE, 0, double, (given(X), given(T(8, 4).t())), (given(X), given(T(8, 4).t().contiguous()))),
    Way(KIND.DTYPE, 0, double, (given(X), given(X.long())), (given(X), given(X.long().float()))),
    Way(
        KIND.REQUIRES_GRAD,
        0,
        double,
        (given(X), given(T(4, 8, requires_grad=True))),
        (given(X), given(T(4, 8, requires_grad=True).detach())),
    ),
    Way(KIND.NUM_DIMS, 0, double, (given(T(1, 8)), given(T(8))), (given(T(1, 8)), given(T(8).unsqueeze(0)))),
    Way(
        KIND.DISPATCH_KEYS,
        0,
        double,
        (in_inference(creates=False), in_inference(creates=True)),
        (in_inference(creates=False), in_inference(creates=False)),
    ),
    Way(
        KIND.TENSOR_TYPE,
        0,
        double,
        (given(X), given(X.as_subclass(Own))),
        (given(X), given(X.as_subclass(Own).as_subclass(Tensor))),
    ),
    Way(KIND.DYNAMIC_MARK, 0, double, (given(X), marked(4, 8)), (marked(4, 8), marked(4, 8))),
    Way(KIND.GLOBAL_STATE, 0, double, (given(T(3)), without_grad), (without_grad, without_grad)),
    Way(
        KIND.TRAINING,
        0,
        Model(2.0),
        (changed(training=True), changed(training=False)),
        (changed(training=False), changed(training=False)),
    ),
    Way(KIND.MODULE_INT, 0, Model(2), (changed(k=2), changed(k=3)), (changed(k=T(())), changed(k=T(()) * 3))),
    Way(KIND.NUMBER, 0, Model(2.0), (changed(k=0.5), changed(k=0.75)), (changed(k=T(())), changed(k=T(()) * 3))),
    Way(
        KIND.VALUE,
        0,
        lambda x, mode: x * 2 if mode == "a" else x,
        (given(X, "a"), given(X, "b")),
        (given(X, "a"), given(X, "a")),
    ),
    Way(KIND.LENGTH, 0, first_of, (given([X]), given([X, X * 2])), (given([X, X * 0]), given([X, X * 2]))),
    Way(KIND.KEYS, 0, by_name, (given({"a": X}), given({"b": X})), (given({"a": X}), given({"a": X}))),
    Way(KIND.IDENTITY, 0, applied, (given(X, made()), given(X, made())), (given(X, NEGATIVE), given(X, NEGATIVE))),
    Way(KIND.DUPLICATE, 0, total, (given(X, X * 1), given(X, X)), (given(X, X * 1), given(X, X.clone()))),
    Way(KIND.TYPE, 0, double, (given(X), given(2.5)), (given(X), given(torch.tensor(2.5).expand(4, 8).contiguous()))),
]


@contextmanager
def recorded() -> Iterator[Callable[[], tuple[RecompileCause, ...]]]:
    with CaptureSession() as session:
        yield lambda: recompile_causes([digest_rank(session.record(rank=0, world_size=1))])


def causes(program: Any, calls: tuple[Any, Any]) -> tuple[RecompileCause, ...]:
    torch.compiler.reset()
    with recorded() as found:
        compiled = torch.compile(program, backend="eager")
        for call in calls:
            call(compiled)
    return found()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.kind.value} {way.number}")
def test_the_advice_avoids_the_recompile(way: Way) -> None:
    (found,) = causes(way.program, way.calls)
    assert found.kind == way.kind.value
    assert found.advice.count("; or ") == len(ADVICE[way.kind]) - 1 >= way.number
    assert causes(way.program, way.followed) == ()


def test_every_way_has_a_program() -> None:
    assert {(way.kind, way.number) for way in WAYS} == {
        (kind, number) for kind, ways in ADVICE.items() for number in range(len(ways))
    }
