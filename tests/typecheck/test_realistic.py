"""Modules as users write them: each broken one is found, and no correct one alarms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.typecheck import fresh, realistic, third
from tests.typecheck.cases import Case
from tests.typecheck.programs import TP, WIDTH, built
from tpcompile.typecheck import Report, check_types

LATER = {
    "reduces_under_no_grad": ("gradient-cut", "y = m.comm.all_reduce(y)"),
    "causal_context_parallel": ("local-positions", "is_causal=True"),
    "shared_kv_head_without_sum": ("missing-copy", "F.linear(x, m.kv)"),
    "cumsum_over_sharded_tokens": ("crosses-shards", "torch.cumsum(x_BsD, dim=1)"),
    "rotates_halves_of_sharded_features": ("crosses-shards", "torch.roll"),
    "adds_rows_to_columns": ("mixed-shards", "m.row_shard + m.column_shard"),
    "sums_local_means": ("wrong-reduce-op", "m.comm.all_reduce(loss)"),
    "gathers_a_partial_sum": ("partial-used-as-whole", "m.comm.all_gather(y"),
    "gathers_what_is_replicated": ("double-gather", "m.comm.all_gather(y"),
    "functional_gather_of_features_along_tokens": ("wrong-gather-dim", "funcol.all_gather_tensor"),
    "weight_norm_of_a_sharded_dim": ("local-statistic", "torch._weight_norm(m.down"),
    "batch_norm_of_a_sharded_batch": ("local-statistic", "F.batch_norm("),
    "averages_masked_means": ("partial-used-as-whole", "total / count"),
    "reduces_a_shard": ("shards-added", "m.comm.all_reduce(h)"),
}
"""Program -> rule and code of the line, for one of each class."""


def checked(case: Case, **options: Any) -> Report:
    x = torch.ones(2, 8, WIDTH)
    return check_types(
        built(case.forward, **case.layouts), (x,), tp=TP, input_types=(case.input_type,), output_type=case.output_type,
        **options,
    )  # fmt: skip


def name_of(case: Case) -> str:
    return case.forward.__name__


FOUND = [case for case in third.BROKEN if case.forward not in third.NOT_DECIDED]


@pytest.mark.parametrize("case", [*realistic.BROKEN, *fresh.BROKEN, *FOUND], ids=name_of)
def test_a_broken_module_is_found(case: Case) -> None:
    report = checked(case)
    assert report.finding is not None, str(report)
    rule, code = LATER.get(name_of(case), (report.finding.rule, ""))
    assert report.finding.rule == rule and code in report.finding.site.source, str(report)


@pytest.mark.parametrize("case", [*realistic.CORRECT, *fresh.CORRECT, *third.CORRECT], ids=name_of)
def test_a_correct_module_raises_no_alarm(case: Case) -> None:
    report = checked(case)
    assert report.finding is None, str(report)
    assert report.is_complete == (report.not_followed_since == "")


@pytest.mark.parametrize("forward", third.NOT_DECIDED, ids=lambda forward: forward.__name__)
def test_what_the_docs_call_not_found_is_not_found(forward: Any) -> None:
    (case,) = (case for case in third.BROKEN if case.forward is forward)
    assert checked(case).finding is None
