"""Ops that several kernels compute, and buffers that a limit put into memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import Tensor

from tests.fusion import codegen
from tests.fusion.zoo import SQUARE, Program
from tpcompile.fusion import manifest_text
from tpcompile.fusion.manifest_records import Decisions, Manifest

pytestmark = pytest.mark.slow
LARGE = (64, 512)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def _computed_in_two_orders(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.abs()
    return y.sum(0), (y + 1).sum(1)


def _read_by_both(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    total = sum(inputs[1:], start=inputs[0])
    return total.sum(0), (total + 1).sum(1)


def _heavy(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    return y.sum(0), (y + 1).sum(1)


def recorded(program: Program) -> tuple[Decisions, list[str]]:
    manifest = codegen.recorded(program)
    (graph,) = manifest.graphs
    assert graph.is_aligned
    assert graph.decisions is not None
    return graph.decisions, text(manifest)


def text(manifest: Manifest) -> list[str]:
    return [line.plain for line in manifest_text.manifest(manifest, num_missed=0)]


def test_an_op_that_two_kernels_compute_is_named_with_its_line() -> None:
    found, lines = recorded(Program(_computed_in_two_orders, (LARGE,)))
    (one,) = found.recomputed
    assert one.op == "aten.abs"
    assert len(one.nodes) == 2
    assert [line.code for line in one.lines] == ["y = x.abs()"]
    assert any("0 and 1: abs  test_inlining.py:" in line for line in lines), lines


def test_an_op_that_is_read_from_memory_by_two_kernels_is_computed_once() -> None:
    found, lines = recorded(Program(_read_by_both, (LARGE,) * 6))
    assert found.recomputed == ()
    (made,) = found.realized
    assert (made.setting, re.findall(r"\d+", made.text)) == ("realize_reads_threshold", ["6", "4"])
    assert any(made.buffer in line and "(config.realize_reads_threshold)" in line for line in lines)


def test_below_the_limit_the_same_program_computes_it_twice() -> None:
    found, _ = recorded(Program(_read_by_both, (LARGE,) * 3))
    assert found.realized == ()
    assert {one.op for one in found.recomputed} == {"aten.add"}


def test_the_limit_is_the_one_that_is_set() -> None:
    found, _ = recorded(Program(_read_by_both, (LARGE,) * 6, {"realize_reads_threshold": 8}))
    assert found.realized == ()


def test_an_op_that_a_cpu_computes_once_is_named() -> None:
    found, _ = recorded(Program(_heavy, (LARGE,)))
    (made,) = found.realized
    assert made.setting == "" and re.match("exp, .*CPU .*once$", made.text)


def test_a_program_of_one_kernel_has_neither() -> None:
    found, lines = recorded(Program(lambda x: x.sin() * 2, (SQUARE,)))
    assert (found.recomputed, found.realized) == ((), ())
    assert not any("computed in" in line or "in memory" in line for line in lines)
