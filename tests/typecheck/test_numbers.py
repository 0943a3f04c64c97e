"""Numbers of all ranks beside one device: faults of hand-written modules are found, right modules are right."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import replace

import pytest
import torch

from tpcompile.evidence.records import MistakeKind, UserLine, WrongOp
from tpcompile.typecheck.assembly import possible
from tpcompile.typecheck.decided import decided
from tpcompile.typecheck.numbers import ForkError, run_forked
from tpcompile.typecheck.report import Numbers, Report, Violation
from tpcompile.typecheck.site import Site
from tpcompile.typecheck.targets import check_target

WRITTEN = "tests.typecheck.written"
FAULTS = [
    ("megatron", "MLP", "residual_inside"),
    ("megatron", "VocabEmbedding", "no_offset"),
    ("megatron", "SequenceBlock", "scatter_first"),
    ("megatron", "ColumnGather", "wrong_dim"),
    ("megatron", "FullWidthNorm", "divided_locally"),
    ("serving", "GroupedHeads", "own_kv_zero"),
    ("serving", "GateUp", "no_reduce"),
    ("serving", "GreedyHead", "local_choice"),
    ("serving", "LogitsHead", "reversed"),
    ("serving", "Experts", "shared_inside"),
    ("context", "Rotary", "local_rotary"),
    ("context", "Ulysses", "swapped"),
    ("context", "DTensorEdges", "gradient_left"),
    ("unusual", "Uneven", "no_f"),
    ("unusual", "Dropped", "on_summands"),
    ("unusual", "Dropped", "whole_by_rank"),
    ("unusual", "Summed", "no_hook"),
]
RIGHT = [
    ("megatron", "SequenceBlock"),
    ("serving", "GateUp"),
    ("serving", "SharedKeyHeads"),
    ("serving", "PackedKeyHeads"),
    ("serving", "Dispatch"),
    ("context", "MergedAttention"),
    ("context", "DTensorPlan"),
    ("unusual", "Uneven"),
    ("unusual", "Strided"),
    ("unusual", "Dropped"),
    ("unusual", "Explicit32"),
    ("unusual", "KeyBias"),
    ("unusual", "Ring"),
    ("unusual", "ServedMLP"),
]


def checked(file: str, family: str, fault: str = "") -> Report:
    settings = [f"family={family}", *([f"fault={fault}"] if fault else [])]
    return check_target(f"{WRITTEN}.{file}:build", settings)


def lines_of(file: str, family: str, fault: str) -> set[int]:
    """The lines that have the fault's mark."""
    source, start = inspect.getsourcelines(getattr(importlib.import_module(f"{WRITTEN}.{file}"), family))
    return {start + place for place, line in enumerate(source) if re.search(rf"<- {fault}\b", line)}


@pytest.mark.slow
@pytest.mark.parametrize(("file", "family", "fault"), FAULTS)
def test_a_fault_is_found_at_its_line(file: str, family: str, fault: str) -> None:
    finding = checked(file, family, fault).finding
    assert finding is not None
    assert finding.site.line in lines_of(file, family, fault)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "family"), RIGHT)
def test_a_right_module_is_shown_to_be_right(file: str, family: str) -> None:
    report = checked(file, family)
    assert report.numbers is not None and report.numbers.is_right
    assert report.is_complete and not report.violations


@pytest.mark.slow
def test_what_cannot_be_run_is_not_compared_and_says_why() -> None:
    report = check_target("tests.typecheck.plain_modules:early_bias_for_several_ranks")
    assert report.numbers is not None and report.numbers.why_not and not report.numbers.wrong


TYPED = Violation("missing-copy", "aten.mm", ("I", "V(1)"), Site("mlp.py", 7), "", "", (0, 3))
REPORT = Report(4, (0, 3), 10, (TYPED,), num_judged=10)


@pytest.mark.parametrize(
    ("numbers", "rules"),
    [
        (Numbers(is_right=True, with_gradients=True), []),
        (Numbers(is_right=True, with_gradients=False), ["missing-copy"]),
        (Numbers(why_not="it raised"), ["missing-copy"]),
        (Numbers(wrong=("output 0",), op=WrongOp(about="aten.add")), ["missing-copy", "wrong-numbers"]),
        (
            Numbers(wrong=("output 0",), op=WrongOp(about="aten.mean", kind=MistakeKind.LOCAL_STATISTIC)),
            ["local-statistic", "missing-copy"],
        ),
        (
            Numbers(wrong=("grad up.weight",), op=WrongOp(about="aten.mm", line=UserLine(file="mlp.py", line=7))),
            [TYPED.rule],
        ),
    ],
)
def test_numbers_decide_where_all_was_compared(numbers: Numbers, rules: list[str]) -> None:
    assert [violation.rule for violation in decided(REPORT, numbers, train=True).violations] == rules


def test_a_gradient_that_one_device_does_not_have_either_stays_cut() -> None:
    cut = replace(TYPED, rule="gradient-cut")
    numbers = Numbers(is_right=True, with_gradients=True, ungraded=("up.weight",))
    assert decided(replace(REPORT, violations=(cut,)), numbers, train=True).violations == (cut,)


@pytest.mark.parametrize("full", [(24, 3), (3, 24)])
def test_parts_in_every_possible_layout_make_the_full_tensor(full: tuple[int, int]) -> None:
    dim = full.index(24)
    part = tuple(6 if each == 24 else each for each in full)
    tensor = torch.randn(full)
    layouts = possible(full, [part] * 4)
    assert len(layouts) > 3 and {layout.dim for layout in layouts} == {dim}
    for layout in layouts:
        assert torch.equal(layout.full([layout.part(tensor, rank) for rank in range(4)], full), tensor)


def test_equal_parts_of_two_key_heads_are_held_by_two_ranks_each() -> None:
    (layout,) = possible((8, 3), [(4, 3)] * 4)
    assert [rows.tolist() for rows in layout.rows] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2


def test_of_packed_queries_and_two_key_heads_each_rank_has_its_queries_and_one_of_both() -> None:
    (layout,) = possible((48,), [(16,)] * 4)
    assert [(rows[0].item(), rows[8].item(), rows[12].item()) for rows in layout.rows] == [
        (0, 32, 40), (8, 32, 40), (16, 36, 44), (24, 36, 44)
    ]  # fmt: skip
    summed = layout.summed([torch.ones(16)] * 4, (48,))
    assert summed.tolist() == [1.0] * 32 + [2.0] * 16


@pytest.mark.parametrize("parts", [[(7,)] * 4, [(2, 2)] * 4, [(1,)] * 4])
def test_what_is_no_part_has_no_layout(parts: list[tuple[int, ...]]) -> None:
    assert not possible((8,), parts)


def test_forked_functions_return_in_their_order() -> None:
    assert run_forked([lambda number=number: number * 2 for number in range(3)], timeout_s=20) == [0, 2, 4]


def test_a_fork_that_raises_is_named_and_no_other_is_waited_for() -> None:
    def forever() -> None:
        while True:
            pass

    with pytest.raises(ForkError, match="ZeroDivisionError"):
        run_forked([forever, lambda: 1 / 0], timeout_s=20)
