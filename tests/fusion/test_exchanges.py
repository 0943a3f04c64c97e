"""A collective beside a matmul: async TP is named, and why it did not take the pair."""

from __future__ import annotations

import re

import pytest

from tpcompile.fusion.manifest_records import Launch, Role
from tpcompile.fusion.reasons import Boundary, Reason
from tpcompile.fusion.why_not import ASYNC_TP, reason_of_exchange

GATHER = Launch(role=Role.COLLECTIVE, name="all_gather", kind="all_gather_into_tensor")
SCATTER = Launch(role=Role.COLLECTIVE, name="reduce_scatter", kind="reduce_scatter_tensor")
NORM = Launch(role=Role.KERNEL, name="norm", kind="red", ops=("aten.mean", "aten.mul"))


def matmul(op: str) -> Launch:
    return Launch(role=Role.EXTERN, name="extern_kernels.mm", kind="extern_kernels", ops=(f"aten.{op}",))


def reason(first: Launch, second: Launch, *, is_on: bool = False) -> Reason:
    found = reason_of_exchange((first, second), {ASYNC_TP: "True"} if is_on else {})
    assert found is not None
    assert found.boundary is Boundary.COLLECTIVE
    return found


@pytest.mark.parametrize(
    ("pair", "waits"),
    [
        ((GATHER, matmul("mm")), "the matmul waits for the all-gather"),
        ((matmul("_scaled_mm"), SCATTER), "the reduce-scatter waits for the matmul"),
    ],
)
def test_async_tp_is_what_overlaps_them(pair: tuple[Launch, Launch], waits: str) -> None:
    found = reason(*pair)
    assert found.text == waits
    assert "config._micro_pipeline_tp" in found.remedy
    assert "enable_symm_mem_for_group" in found.remedy


def test_where_async_tp_is_on_it_is_said_that_it_did_not_match() -> None:
    found = reason(GATHER, matmul("mm"), is_on=True)
    assert re.match("async TP .*not match", found.text)
    assert "config._micro_pipeline_tp" not in found.remedy
    assert "enable_symm_mem_for_group" in found.remedy


@pytest.mark.parametrize("op", ["bmm", "baddbmm", "addmm"])
def test_a_matmul_that_async_tp_does_not_look_for_is_named(op: str) -> None:
    found = reason(GATHER, matmul(op), is_on=True)
    assert found.text.endswith(f" {op}")
    assert bool(found.remedy) == (op == "bmm")  # of an addmm without its bias, Inductor makes an addmm again


@pytest.mark.parametrize("pair", [(matmul("mm"), GATHER), (SCATTER, matmul("mm")), (GATHER, NORM)])
def test_async_tp_is_not_named_where_it_takes_nothing(pair: tuple[Launch, Launch]) -> None:
    assert "async TP" not in reason(*pair).text
    assert "_micro_pipeline_tp" not in reason(*pair).remedy


def test_two_launches_without_a_collective_have_no_such_reason() -> None:
    assert reason_of_exchange((NORM, matmul("mm")), {}) is None
