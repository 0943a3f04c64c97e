"""Compiled graphs: which sums become the op, that they are right, what is recorded of them, and when code is reused."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from tests.by_size import ranks
from tests.by_size.rows import ON_CPU
from tpcompile.by_size.setting import sums
from tpcompile.by_size.table import shipped
from tpcompile.errors import ConfigError
from tpcompile.testing import run_on_ranks

pytestmark = pytest.mark.slow


@cache
def ops() -> dict[str, dict[str, Any]]:
    first, second = run_on_ranks(ranks.all_ops)
    assert first == second
    return dict(first)


def test_a_sum_that_a_row_holds_becomes_the_op() -> None:
    assert ops()["small"] == {"op": 1, "nccl": 0, "right": True}


@pytest.mark.parametrize("name", ["large", "odd", "double", "max"])
def test_all_other_sums_stay_as_they_are(name: str) -> None:
    assert ops()[name] == {"op": 0, "nccl": 1, "right": True}


def test_gradients_of_replicated_weights_are_one_sum() -> None:
    for found in run_on_ranks(ranks.replicated_weights):
        assert found == {"sums": 1, "right": [True, True]}


def test_code_for_all_sizes_chooses_when_it_runs() -> None:
    for found in run_on_ranks(ranks.dynamic_sizes):
        assert found == {"rows": 1, "op": 1, "right": [True] * 4}


def test_what_is_recorded_has_the_all_reduce_the_launch_and_the_table() -> None:
    for found in run_on_ranks(ranks.evidence):
        assert found["collectives"] == [("all_reduce", "sum", True, True)]
        assert (found["breaks"], found["refused"]) == (0, [])
        assert found["launches"] == ["torch.ops.tpcompile.all_reduce_by_size.default"]
        assert re.fullmatch(rf"by_size, .*{ON_CPU.digest}: two_shot .*4096 .*\(2 x cpu\)", found["environment"])
        (line,) = found["groups"]
        assert line.endswith("'4096:two_shot', group:default_pg)"), line


def test_code_is_reused_for_the_same_table_only() -> None:
    for found in run_on_ranks(ranks.cached):
        assert found == [(0, 1), (1, 0), (0, 1)]


def test_ranks_with_different_settings_are_named_before_they_compile() -> None:
    for text in run_on_ranks(ranks.different_settings):
        assert re.match(rf"summed .*all_reduce: by_size, .*{ON_CPU.digest}: .* 0 / nccl .* 1", text), text


def test_a_gpu_or_hosts_that_the_table_does_not_have_use_nccl_and_say_so() -> None:
    for found in run_on_ranks(ranks.texts):
        assert re.fullmatch(rf"by_size, table {shipped().digest}: not measured .*2 x cpu: nccl", found["shipped"])
        assert re.search(r"two_shot .*4096 .*\(2 x cpu\)$", found["own"])
        assert re.fullmatch(rf"by_size, table {ON_CPU.digest}: not measured .*2 x cpu: nccl", found["two hosts"])


def test_an_unknown_setting_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"all_reduce 'fast'; .*nccl, by_size"):
        sums("fast")  # type: ignore[arg-type]
    assert sums("nccl") is None
