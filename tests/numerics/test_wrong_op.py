"""The op with which wrong numbers begin, found by two gloo ranks; every fault in one job."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile.collectives.strategies import Collectives, TpComm
from tpcompile.numerics.fingerprints import fingerprint, summary
from tpcompile.numerics.judged import as_text, sums_over_ranks
from tpcompile.numerics.trace import Trace
from tpcompile.numerics.traced import traced
from tpcompile.numerics.wrong_op import wrong_op
from tpcompile.testing import run_on_ranks

WIDTH, HIDDEN = 6, 8
DTYPES = (torch.float32, torch.bfloat16)
Step = Callable[[Tensor], Tensor]
Found = tuple[str, str, str]
"""The op, the code of its line, the kind of mistake; empty where nothing was found."""


def unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Fault:
    """A step at one place of the MLP, and what is to be named."""

    place: str
    step: Step
    op: str
    code: str


FAULTS = {
    "rows moved": Fault("entry", lambda x: x.roll(1, 0), "aten.roll", "x.roll(1, 0)"),
    "a different activation": Fault("hidden", lambda h: h.tanh(), "aten.tanh", "h.tanh()"),
    "bias on every rank": Fault("partial", lambda y: y + 1, "aten.add", "y + 1"),
    "rows turned round": Fault("sum", lambda y: y.flip(0), "aten.flip", "y.flip(0)"),
    "average": Fault("sum", lambda y: y / 2, "aten.div", "y / 2"),
    "no number": Fault("sum", lambda y: y * float("nan"), "aten.mul", "float("),
}
TENSORS = ("up", "down", "scale")


class MLP(nn.Module):
    """A column-parallel layer and a row-parallel one."""

    def __init__(self, comm: TpComm, fault: Fault | None = None, *, reduces: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        up, down = torch.randn(HIDDEN, WIDTH, generator=generator), torch.randn(WIDTH, HIDDEN, generator=generator)
        self.up = nn.Parameter(up.chunk(comm.size)[comm.rank].clone())
        self.down = nn.Parameter(down.chunk(comm.size, 1)[comm.rank].clone())
        self.register_buffer("scale", torch.linspace(1, 2, WIDTH))
        self.comm, self.fault, self.reduces = comm, fault, reduces

    def at(self, place: str, x: Tensor) -> Tensor:
        return self.fault.step(x) if self.fault is not None and self.fault.place == place else x

    def forward(self, x: Tensor) -> Tensor:
        h = self.at("hidden", (self.at("entry", x) @ self.up.T).relu())
        y = self.at("partial", h @ self.down.T)
        if self.reduces:
            y = self.at("sum", self.comm.all_reduce(y)) * self.scale
        return y


def found(module: MLP, dtype: torch.dtype) -> Found:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = Collectives(None)
    references = [(MLP(alone, reduces=module.reduces).to(of), (x.to(of),)) for of in (dtype, torch.float64)]
    item = wrong_op(module.to(dtype), (x,), references, "", module.comm, dtype=dtype)
    if item is None or item.line is None:
        return "", "", ""
    return item.about, item.line.code, item.kind.value


def worker() -> dict[str, Found]:
    results = {}
    comm = Collectives(dist.group.WORLD)
    for dtype in DTYPES:
        results[f"right {dtype}"] = found(MLP(comm), dtype)
        for name, fault in FAULTS.items():
            results[f"{name} {dtype}"] = found(MLP(comm, fault), dtype)
    for name in TENSORS:
        module = MLP(comm)
        if comm.rank == 1:
            with torch.no_grad():
                module.get_parameter(name).mul_(2) if name != "scale" else module.scale.mul_(2)
        results[name] = found(module, torch.float32)
    results["not reduced"] = found(MLP(comm, reduces=False), torch.float32)
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Found]]:
    return run_on_ranks(worker, world_size=2, timeout_s=120)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_run_has_none(ranks: list[dict[str, Found]], dtype: torch.dtype) -> None:
    assert [rank[f"right {dtype}"] for rank in ranks] == [("", "", "")] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAULTS)
def test_the_op_of_a_fault_is_named_with_its_line(ranks: list[dict[str, Found]], name: str, dtype: torch.dtype) -> None:
    for rank in ranks:
        op, code, _ = rank[f"{name} {dtype}"]
        assert op == FAULTS[name].op and FAULTS[name].code in code


@pytest.mark.parametrize("name", TENSORS)
def test_a_wrong_parameter_or_buffer_is_named_with_the_line_that_uses_it(
    ranks: list[dict[str, Found]], name: str
) -> None:
    op, code, kind = ranks[1][name]
    assert (op, kind) == (name, "tp times")  # it was multiplied by 2
    assert f"self.{name}" in code


@pytest.mark.parametrize(
    ("name", "kind"),
    [("average", "1 / tp"), ("rows turned round", "different order"), ("rows moved", "different order")],
)
def test_the_kind_of_a_fault_is_named(ranks: list[dict[str, Found]], name: str, kind: str) -> None:
    assert ranks[0][f"{name} {torch.float32}"][2] == kind


def test_an_output_without_its_sum_over_the_ranks_is_named(ranks: list[dict[str, Found]]) -> None:
    op, code, kind = ranks[0]["not reduced"]
    assert (op, kind) == ("aten.mm", "not summed")
    assert "h @ self.down.T" in code


def test_ranks_that_ran_different_ops_have_no_sums() -> None:
    x = torch.ones(2, 2)
    one, two = traced(nn.ReLU(), (x,)), traced(nn.Tanh(), (x,))
    assert sums_over_ranks([as_text(one), as_text(two)]) == []
    assert len(sums_over_ranks([as_text(one), as_text(one)])) == len(one.values)


def test_a_fingerprint_is_linear_and_tells_a_permutation() -> None:
    one, two = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    sums = [a + b for a, b in zip(fingerprint(one), fingerprint(two), strict=True)]
    assert sums == pytest.approx(fingerprint(one + two), rel=1e-5, abs=1e-5)
    assert fingerprint(one) != pytest.approx(fingerprint(one.roll(1, 0)), rel=1e-2)
    size = (sum(each**2 for each in fingerprint(one)) / len(fingerprint(one))) ** 0.5
    assert 0.3 < size / float(one.norm()) < 3


@pytest.mark.parametrize("shape", [(12,), (6, 12), (3, 4, 12), (2, 1, 300), (0, 4), ()])
def test_a_part_has_the_fingerprint_of_a_tensor_that_holds_it_alone(shape: tuple[int, ...]) -> None:
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = summary(full, size=2)
    assert found.whole == fingerprint(full)
    for part in found.parts:
        (dim,) = [place for place, length in enumerate(part.shape) if length != shape[place]]
        same = [
            torch.cat([piece.chunk(2, dim)[part.rank] for piece in full.chunk(pieces, dim)], dim)
            for pieces in (1, 2, 3)
            if shape[dim] % (2 * pieces) == 0
        ]
        assert any(fingerprint(one) == pytest.approx(part.tensor, abs=1e-9) for one in same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_masks_a_place_out_is_the_same_in_each_dtype(dtype: torch.dtype) -> None:
    scores = torch.tensor([[0.5, -math.inf, -math.inf], [0.25, 2.0, -math.inf]])
    lowest = scores.to(dtype).clamp(min=torch.finfo(dtype).min)
    assert fingerprint(lowest) == fingerprint(scores)
    assert fingerprint(lowest.roll(1, 1)) != fingerprint(scores)


def test_two_rows_that_change_places_change_the_fingerprint() -> None:
    x = torch.randn(256, 3, generator=torch.Generator().manual_seed(0))
    for row in range(1, 256):
        order = torch.arange(256)
        order[[0, row]] = order[[row, 0]]
        assert fingerprint(x) != pytest.approx(fingerprint(x[order]), rel=1e-3)
    assert fingerprint(x[:3]) != pytest.approx(fingerprint(x[:3].T.contiguous()), rel=1e-3)


def test_what_an_op_writes_in_place_is_followed() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            y.mul_(3)
            return y + 1

    trace: Trace = traced(InPlace(), (torch.ones(2),))
    added: Any = trace.values[trace.outputs[""][0]]
    (source,) = added.sources
    assert trace.values[source].name == "aten.mul_"
