"""A defect in the code that names causes: the difference is still found, with its ranks, and the defect is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.evidence.samples import between, call, collective, compiled, divergences, only, record, reduce
from tpcompile.evidence.comparison import by_layer as layerdiff
from tpcompile.evidence.comparison import compare
from tpcompile.evidence.comparison import compiled_by_some as alone
from tpcompile.evidence.records import DivergenceClass, Layer
from tpcompile.evidence.records.causes import Cause


def broken(*_: Any) -> NoReturn:
    raise KeyError("op")


def test_layers_that_differ_are_found_without_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerdiff._Layer, "red", broken)
    ranks = [compiled(call("mul", "%0", factor), reduce("%1")) for factor in ("2", "2", "3")]
    found = only(*ranks)
    assert (found.cause, found.is_red, found.layer) == (Cause.UNKNOWN, True, Layer.GRAPH)
    assert [group.ranks for group in found.groups] == [(0, 1), (2,)]
    assert "KeyError: 'op'" in found.title and Path(__file__).name in found.title


def test_a_compile_of_one_rank_is_found_without_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "compiled_alone", broken)
    assert compare.compiled_alone is not alone.compiled_alone
    found = only([compiled(), compiled(call("relu"), function="other")], [compiled()])
    assert [group.ranks for group in found.groups] == [(0,), (1,)] and found.is_red
    assert "other app/model.py:3" in found.title and "KeyError" in found.title


def test_a_rank_whose_log_ended_before_is_not_blamed_and_collectives_stay_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layerdiff._Layer, "red", broken)
    sums = [
        record(rank, compiled(collectives=(collective(reduce_op=op),)), world_size=3)
        for rank, op in enumerate(("sum", "max"))
    ]
    cut = record(2, world_size=3, is_cut=True)
    (found,) = divergences(*sums, cut)
    assert [group.ranks for group in found.groups] == [(0,), (1,)]
    assert found.cls == DivergenceClass.COLLECTIVES


def test_a_store_that_does_not_respond_is_not_a_bug_in_tpcompile(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> NoReturn:
        raise ConnectionError

    monkeypatch.setattr(layerdiff._Layer, "red", gone)
    with pytest.raises(ConnectionError):
        between(compiled(), compiled(call("mul", "%0", "2")))


def test_equal_compiles_are_not_made_unequal_by_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "of_slot", broken)
    with pytest.raises(KeyError):
        between(compiled(), compiled())
