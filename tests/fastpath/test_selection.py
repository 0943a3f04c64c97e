"""Which fast path runs is one decision for all ranks of a group, taken from what was measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tpcompile
from tests.rank_jobs import run_on_ranks
from tpcompile.errors import ExitCode
from tpcompile.evidence.records import Verdict
from tpcompile.fastpath import Selection, fast_path, registered, registry, selection
from tpcompile.fastpath.selection import Decision, Ratio, Said, ShapeClass, choose, obstacle, settle

SHAPES = ((2, 128, 5120), (5120,))
TIMEOUT_S = 3.0
SHAPE = ShapeClass.of(SHAPES, torch.bfloat16, tp=2)


def plain(x: Tensor) -> Tensor:
    return x * 2


def launch(x: Tensor) -> Tensor:
    return x * 2


def cell(*, ratio: float = 1.5, **other: Any) -> Ratio:
    """A measured cell that fits `SHAPE`."""
    fitting = {"path": "norm", "device": "sm90", "dtype": "bfloat16", "tp": 2, "tokens": 256, "widths": (5120, 5120)}
    measured = {"ratio_to_inductor": ratio, "launch": {"blocks": 24}, "command": "bench", "versions": {"torch": "2.13"}}
    return Ratio.model_validate(fitting | measured | other)


def chosen(*table: Ratio, shape: ShapeClass = SHAPE) -> Decision:
    return choose("norm", shape, "sm90", table)


@pytest.fixture(autouse=True)
def nothing_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(selection, "_MADE", {})


def test_a_path_that_was_measured_to_be_faster_is_used_with_the_launch_that_was_measured() -> None:
    decision = chosen(cell())
    assert (decision.is_used, decision.launch) == (True, {"blocks": 24})
    assert decision.why == "1.50 times the speed of Inductor's code at 256 tokens on sm90"
    assert decision.label == "norm for 256 tokens of 5120, 5120 in bfloat16 at tp 2"


@pytest.mark.parametrize("ratio", [1.0, 0.7])
def test_a_path_that_was_measured_not_to_be_faster_is_not_used(ratio: float) -> None:
    decision = chosen(cell(ratio=ratio))
    assert (decision.is_used, decision.says) == (False, f"reference ({decision.why})")
    assert decision.status == f"not applicable: {ratio:.2f} times the speed of Inductor's code at 256 tokens on sm90"


@pytest.mark.parametrize(
    "other",
    [{"path": "other"}, {"device": "sm80"}, {"dtype": "float16"}, {"tp": 4}, {"widths": (4096, 4096)}, {"tokens": 63},
     {"tokens": 1025}],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_a_path_that_was_not_measured_there_is_not_used(other: dict[str, Any]) -> None:
    decision = chosen(cell(**other))
    assert (decision.is_used, decision.why) == (False, "not measured on sm90 for this shape class")


def test_the_nearest_number_of_tokens_decides_and_of_equally_near_ones_the_slower() -> None:
    assert not chosen(cell(tokens=64), cell(tokens=300, ratio=0.9)).is_used
    assert chosen(cell(tokens=64, ratio=0.9), cell(tokens=300)).is_used
    for table in ([cell(tokens=128), cell(tokens=512, ratio=0.9)], [cell(tokens=512, ratio=0.9), cell(tokens=128)]):
        assert not chosen(*table).is_used


@pytest.mark.parametrize(("tokens", "rounded"), [(0, 1), (1, 1), (2, 2), (3, 4), (255, 256), (256, 256), (257, 512)])
def test_numbers_of_tokens_are_decided_by_powers_of_two(tokens: int, rounded: int) -> None:
    shape = ShapeClass.of([(tokens, 8)], torch.float32, tp=2)
    assert shape == ShapeClass(tokens=rounded, widths=(8,), dtype="float32", tp=2)
    chosen(cell(), shape=shape)


def test_without_a_table_nothing_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(selection, "_TABLE", tmp_path / "none.json")
    assert selection.shipped_table.__wrapped__() == ()


def test_what_a_process_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = chosen(cell())
    assert obstacle(decision, "sm90").startswith("it is not registered here; install")
    fast_path("norm", replaces=plain, tp="pointwise", min_sm=90)(launch)
    assert obstacle(decision, "sm80") == "it needs sm_90, and this is sm80"
    assert "it has no certificate" in obstacle(decision, "sm90")
    monkeypatch.setattr(selection, "uncertified", lambda path: "")
    assert obstacle(decision, "sm90") == obstacle(decision, "interpreter") == ""
    fast_path("norm", replaces=plain)(launch)
    assert obstacle(decision, "sm90").startswith("it is declared tp=none, at ")
    assert obstacle(chosen(), "sm90") == ""  # the reference runs anywhere


def test_ranks_that_agree_use_the_path() -> None:
    used = chosen(cell())
    assert settle({0: Said(decision=used), 1: Said(decision=used)}) == used


@pytest.mark.parametrize(
    ("other", "missing", "why"),
    [
        (Said(decision=chosen(cell()), obstacle="it needs sm_90, and this is sm80"), (), "rank 1: it needs sm_90"),
        (Said(decision=chosen(cell(launch={"blocks": 28}))), (),
         "used with blocks=24 on rank 0 / used with blocks=28 on rank 1"),
        (Said(decision=chosen()), (), "used with blocks=24 on rank 0 / reference (not measured on sm90 for this"),
        (Said(decision=chosen(cell())), (2, 3), "ranks 2-3 did not decide in time"),
    ],
    ids=["cannot run it", "other launch", "other table", "missing"],
)  # fmt: skip
def test_ranks_that_do_not_agree_all_use_the_reference_and_are_named(other: Said, missing: Any, why: str) -> None:
    decision = settle({0: Said(decision=chosen(cell())), 1: other}, missing)
    assert (decision.is_used, decision.is_refused, decision.launch) == (False, True, {})
    assert why in decision.why and decision.status == f"refused: {decision.why}"


def test_ranks_that_all_choose_the_reference_have_nothing_to_settle() -> None:
    assert not settle({0: Said(decision=chosen()), 1: Said(decision=chosen(cell(ratio=0.5)))}, (2,)).is_refused


def decided() -> dict[str, dict[str, Any]]:
    """Name of each case -> what this rank decided, how long it took, what it wrote, and a verdict on it."""
    selection.uncertified = lambda path: ""
    return {
        "agree": of_case((1.5, 24)),
        "one rank lacks it": of_case((1.5, 24), has_path=dist.get_rank() != 1),
        "grids": of_case((1.5, 24 + 4 * dist.get_rank())),
        "tables": of_case((1.5 - dist.get_rank(), 24)),
        "one rank does not ask": of_case((1.5, 24), asks=dist.get_rank() != 1),
    }


def of_case(measured: tuple[float, int], *, has_path: bool = True, asks: bool = True) -> dict[str, Any]:
    """One decision, asked for 1000 times."""
    registry._REGISTERED.clear()
    selection._MADE.clear()
    if has_path:
        fast_path("norm", replaces=plain, tp="pointwise")(launch)
    group, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    assert group is not None
    ratio, blocks = measured
    table = [cell(ratio=ratio, tp=dist.get_world_size(), device=selection.device_kind(), launch={"blocks": blocks})]
    written: list[str] = []
    handler = logger.add(written.append, format="{level} {message}")
    logger.enable("tpcompile")
    selecting = Selection(group, table=table, timeout_s=TIMEOUT_S, store=store)
    began = time.monotonic()
    found = selecting.decide("norm", SHAPES, torch.bfloat16) if asks else None
    first_s = time.monotonic() - began
    dist.barrier()
    found = found or selecting.decide("norm", SHAPES, torch.bfloat16)  # late
    keys = store.num_keys()
    for _ in range(1000):
        assert selecting.decide("norm", SHAPES, torch.bfloat16) is found
    dist.barrier()
    sent = store.num_keys() - keys
    logger.remove(handler)
    return {
        "decision": found.to_json(),
        "first_s": first_s,
        "sent": sent,
        "written": written,
        "verdict": judged().to_json(),
    }


def judged() -> Verdict:
    """What `check` says of a program beside these decisions."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with tpcompile.capture(mesh, watch=False) as run:
        torch.compile(torch.sin, backend="eager")(torch.ones(2))
    return tpcompile.check(run, timeout_s=30)


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[dict[str, dict[str, Any]]]]:
    yield run_on_ranks(decided, world_size=4, timeout_s=120)


def decision_of(ranks: list[dict[str, dict[str, Any]]], case: str) -> Decision:
    """The one decision of all ranks."""
    (text,) = {rank[case]["decision"] for rank in ranks}
    return Decision.model_validate_json(text)


def verdict_of(ranks: list[dict[str, dict[str, Any]]], case: str) -> Verdict:
    return Verdict.model_validate_json(ranks[0][case]["verdict"])


Ranks = list[dict[str, dict[str, Any]]]


def test_a_path_that_all_ranks_chose_and_can_run_is_used_and_later_questions_send_nothing(ranks: Ranks) -> None:
    assert decision_of(ranks, "agree").launch == {"blocks": 24}
    assert [(rank["agree"]["written"], rank["agree"]["sent"]) for rank in ranks] == [([], 0)] * 4
    assert verdict_of(ranks, "agree").exit_code == ExitCode.PASS


REFUSED = {
    "one rank lacks it": "rank 1: it is not registered here",
    "grids": "used with blocks=24 on rank 0 / used with blocks=28 on rank 1 / used with blocks=32 on rank 2 / used wi",
    "tables": "used with blocks=24 on rank 0 / reference (0.50 times the speed",
    "one rank does not ask": "rank 1 did not decide in time",
}


@pytest.mark.parametrize(("case", "why"), REFUSED.items())
def test_where_one_rank_differs_all_use_the_reference_with_one_warning_that_names_it(
    ranks: Ranks, case: str, why: str
) -> None:
    decision = decision_of(ranks, case)
    assert (decision.is_used, decision.is_refused) == (False, True)
    assert why in decision.why
    (written,) = [text for rank in ranks for text in rank[case]["written"]]
    assert written.startswith("WARNING all ranks use the reference of fast path norm for 256 tokens") and why in written
    if case != "one rank does not ask":
        assert max(rank[case]["first_s"] for rank in ranks) < TIMEOUT_S  # nobody is waited for


@pytest.mark.parametrize(("case", "values"), [("grids", ("blocks=24", "blocks=28")), ("tables", ("used", "reference"))])
def test_ranks_that_chose_differently_are_red_and_the_values_are_named(
    ranks: Ranks, case: str, values: tuple[str, str]
) -> None:
    verdict = verdict_of(ranks, case)
    (found,) = (found for found in verdict.divergences if found.is_red)
    assert found.title.startswith("choice of norm for 256 tokens")
    assert all(value in found.title for value in values)
    assert found.groups[0].ranks == (0,)


def test_the_report_lists_each_decision(ranks: Ranks) -> None:
    for case, status in (("agree", "used: 1.50 times"), ("one rank lacks it", "refused: rank 1: it is not registered")):
        details = [text for check in verdict_of(ranks, case).checks for text in check.details]
        assert any(text.startswith(f"{decision_of(ranks, case).label}: {status}") for text in details), details
    assert registered() == {}
