"""Which fast path runs is one decision for all ranks of a group, taken from what was measured."""

from __future__ import annotations

import io
import itertools
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tpcompile
from tpcompile.errors import ExitCode
from tpcompile.evidence.records import Verdict
from tpcompile.fastpath import Selection, fast_path, measured, registered, registry, selection
from tpcompile.fastpath.measured import Decision, Ratio, ShapeClass, choose, read_table, write_table
from tpcompile.fastpath.selection import Processor, Vote, obstacle, settle
from tpcompile.testing import run_on_ranks

SHAPES = ((2, 128, 5120), (5120,))
TIMEOUT_S = 5.0
"""Of a decision that one rank does not ask for; ranks that wait for a core are later than others by less."""
SHAPE = ShapeClass.of(SHAPES, torch.bfloat16, tp=2)
H200 = "NVIDIA H200"


def plain(x: Tensor) -> Tensor:
    return x * 2


def launch(x: Tensor) -> Tensor:
    return x * 2


def launch_and_wait(x: Tensor, *, exchange: Any) -> Tensor:
    return x * 2


def cell(*, ratio: float = 1.5, **other: Any) -> Ratio:
    """A measured cell that fits `SHAPE`."""
    fitting = {"path": "norm", "gpu": H200, "dtype": "bfloat16", "tp": 2, "tokens": 256, "widths": (5120, 5120)}
    found = {"ratio_to_inductor": ratio, "num_programs": 24, "command": "bench", "versions": {"torch": "2.13"}}
    return Ratio.model_validate(fitting | found | other)


def chosen(*table: Ratio, shape: ShapeClass = SHAPE) -> Decision:
    return choose("norm", shape, H200, table)


def vote(decision: Decision | None = None, *, model: str = H200, processors: int | None = 132, **other: Any) -> Vote:
    """Of a rank that has chosen a fast path whose kernels wait for those of other ranks."""
    processor = Processor(model=model, num_multiprocessors=processors)
    fields = {"decision": decision or chosen(cell()), "processor": processor, "host": "node-1"}
    return Vote(**fields | other)


@pytest.fixture(autouse=True)
def nothing_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(selection, "_MADE", {})


def test_a_path_that_was_measured_to_be_faster_is_used_with_the_grid_that_was_measured() -> None:
    decision = chosen(cell())
    assert (decision.is_used, decision.num_programs) == (True, 24)
    assert re.match(rf"1\.50 times .* 256 tokens .*{H200}$", decision.why)
    assert re.match(r"norm .* 256 .* 5120, 5120 .* bfloat16 .* 2$", decision.label)


@pytest.mark.parametrize("ratio", [1.029, 1.0, 0.7])
def test_a_path_that_was_measured_not_to_be_faster_by_more_than_measurements_differ_is_not_used(ratio: float) -> None:
    decision = chosen(cell(ratio=ratio))
    assert (decision.is_used, decision.says) == (False, f"reference ({decision.why})")
    why = f"{ratio:.2f} times the speed of Inductor's code at 256 tokens on NVIDIA H200; at least 1.03 is required"
    assert decision.status == f"not applicable: {why}"
    assert chosen(cell(ratio=1.03)).is_used


@pytest.mark.parametrize(
    "other",
    [{"path": "other"}, {"gpu": "NVIDIA H100 PCIe"}, {"dtype": "float16"}, {"tp": 4}, {"widths": (4096, 4096)},
     {"tokens": 63}, {"tokens": 1025}],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_a_path_that_was_not_measured_there_is_not_used(other: dict[str, Any]) -> None:
    decision = chosen(cell(**other))
    assert not decision.is_used and "NVIDIA H200" in decision.why


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
    monkeypatch.setattr(measured, "_TABLE", tmp_path / "none.json")
    assert measured.shipped_table.__wrapped__() == ()


def test_a_table_is_written_and_read_back(tmp_path: Path) -> None:
    cells = (cell(quartiles=(1.4, 1.6)), cell(num_programs=None, tp=None))
    write_table(cells, tmp_path / "ratios.json")
    assert read_table(tmp_path / "ratios.json") == cells
    assert "num_programs" not in (tmp_path / "ratios.json").read_text().splitlines()[2]


def test_cells_that_ship_name_their_gpu() -> None:
    assert {cell.gpu for cell in measured.shipped_table()} == {H200, "NVIDIA H100 80GB HBM3"}


def test_what_a_process_lacks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = chosen(cell())
    assert "not registered" in obstacle(decision, "sm90")
    fast_path("norm", replaces=plain, tp="pointwise", min_sm=90)(launch)
    assert re.findall(r"sm_?\d+", obstacle(decision, "sm80")) == ["sm_90", "sm80"]
    assert f"`tpcompile certify {decision.path} " in obstacle(decision, "sm90")
    asked: list[Any] = []
    monkeypatch.setattr(selection, "uncertified", lambda path, **given: asked.append(given) or "")
    assert obstacle(decision, "sm90") == obstacle(decision, "interpreter") == ""
    assert asked == [{"tp": 2, "dtypes": ["bfloat16"]}] * 2  # of a certificate for these
    fast_path("norm", replaces=plain)(launch)
    assert "tp=none, at " in obstacle(decision, "sm90")
    assert obstacle(chosen(), "sm90") == ""  # the reference runs anywhere


def test_ranks_that_agree_use_the_path() -> None:
    used = chosen(cell())
    assert settle({0: vote(used), 1: vote(used)}) == used


@pytest.mark.parametrize(
    ("wanted", "processors", "settled"),
    [(None, (132, 114), 114), (132, (132, 114), 114), (24, (132, 114), 24), (None, (None, None), None)],
    ids=["no limit", "measured on a larger GPU", "measured with fewer", "no GPUs"],
)
def test_kernels_that_wait_get_one_grid_that_the_smallest_gpu_holds(
    wanted: int | None, processors: tuple[int | None, ...], settled: int | None
) -> None:
    used = chosen(cell(num_programs=wanted))
    ranks = {rank: vote(used, processors=number) for rank, number in enumerate(processors)}
    decision = settle(ranks)
    assert (decision.is_used, decision.num_programs) == (True, settled)
    alone = {rank: one.model_copy(update={"host": ""}) for rank, one in ranks.items()}
    assert settle(alone).num_programs is None  # kernels that do not wait for each other


OTHER_GRID = chosen(cell(num_programs=28))


@pytest.mark.parametrize(
    ("other", "missing", "why"),
    [
        (vote(obstacle="it needs sm_90, and this is sm80"), (), "rank 1: it needs sm_90"),
        (vote(OTHER_GRID), (), "used with num_programs=24 on rank 0 / used with num_programs=28 on rank 1"),
        (vote(chosen()), (), "used with num_programs=24 on rank 0 / reference (not measured on NVIDIA H200 for this"),
        (vote(model="NVIDIA H100 PCIe"), (), "different GPUs: NVIDIA H200 on rank 0 / NVIDIA H100 PCIe on rank 1"),
        (vote(host="node-2"), (), "its kernels write into the memory of all ranks: node-1 on rank 0, node-2 on rank 1"),
        (vote(), (2, 3), "ranks 2-3 did not decide in time"),
    ],
    ids=["cannot run it", "other grid", "other table", "other GPU", "other host", "missing"],
)
def test_ranks_that_do_not_agree_all_use_the_reference_and_are_named(other: Vote, missing: Any, why: str) -> None:
    decision = settle({0: vote(), 1: other}, missing)
    assert (decision.is_used, decision.is_refused, decision.num_programs) == (False, True, None)
    assert why in decision.why and decision.status == f"refused: {decision.why}"


def test_ranks_that_all_choose_the_reference_have_nothing_to_settle() -> None:
    assert not settle({0: vote(chosen()), 1: vote(chosen(cell(ratio=0.5)))}, (2,)).is_refused


PLANTED = {
    "agree": {},
    "one rank lacks it": {"has_path": (True, False)},
    "grids": {"num_programs": (24, 28)},
    "tables": {"ratio": (1.5, 0.5)},
    "multiprocessors": {"num_programs": (None,), "processors": (132, 114)},
    "GPUs": {"model": (H200, "NVIDIA H100 PCIe"), "gpu": (H200, "NVIDIA H100 PCIe")},
    "one rank does not ask": {"asks": (True, False), "waits": (True,)},
}
"""Case -> what is different on even and on odd ranks."""


def decided() -> dict[str, dict[str, Any]]:
    """Name of each case -> what this rank decided, what it wrote, and a verdict on it; and how long naming takes."""
    selection.uncertified = lambda path, **_: ""
    found = {name: of_case(**of_this_rank(planted)) for name, planted in PLANTED.items()}
    return found | {"times": {"seconds": times_of_a_planted_grid()}}


def of_this_rank(planted: dict[str, Any]) -> dict[str, Any]:
    return {name: values[dist.get_rank() % 2 % len(values)] for name, values in planted.items()}


def of_case(
    *,
    has_path: bool = True,
    asks: bool = True,
    waits: bool = False,
    model: str = H200,
    processors: int = 132,
    **different: Any,
) -> dict[str, Any]:
    """One decision, asked for 1000 times."""
    registry._REGISTERED.clear()
    selection._MADE.clear()
    if has_path:
        fast_path("norm", replaces=plain, tp="pointwise")(launch_and_wait)
    store = dist.distributed_c10d._get_default_store()
    written = io.StringIO()
    sys.stderr, kept = written, sys.stderr
    selecting = selection_with(model, processors, timeout_s=TIMEOUT_S if waits else 60.0, **different)
    dist.barrier()
    found = selecting.decide("norm", SHAPES, torch.bfloat16) if asks else None
    dist.barrier()
    found = found or selecting.decide("norm", SHAPES, torch.bfloat16)  # late
    keys = store.num_keys()
    for _ in range(1000):
        assert selecting.decide("norm", SHAPES, torch.bfloat16) is found
    dist.barrier()
    sent = store.num_keys() - keys
    sys.stderr = kept
    return {
        "decision": found.to_json(),
        "choices": selection.choices(),
        "sent": sent,
        "written": written.getvalue(),
        "verdict": judged().to_json(),
    }


def selection_with(model: str, processors: int, *, timeout_s: float = 60.0, **different: Any) -> Selection:
    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        here = Processor(model=model, num_multiprocessors=processors)
        patch.setattr(Processor, "here", classmethod(lambda cls: here))
        table = [cell(tp=dist.get_world_size(), **different)]
        store = dist.distributed_c10d._get_default_store()
        return Selection(group, table=table, timeout_s=timeout_s, store=store)


def times_of_a_planted_grid() -> list[tuple[float, float]]:
    """When this rank asked, and when it knew: of 20 decisions, each with different grids on the ranks."""
    fast_path("norm", replaces=plain, tp="pointwise")(launch_and_wait)
    grids = of_this_rank({"num_programs": (24, 28)})
    selections = [selection_with(H200, 132, **grids) for _ in range(4)]  # a selection remembers what it decided
    times = []
    for selecting, tokens in itertools.product(selections, (64, 128, 256, 512, 1024)):
        dist.barrier()
        asked = time.monotonic()  # of the machine, not of the process
        decision = selecting.decide("norm", ((tokens, 5120), (5120,)), torch.bfloat16)
        times.append((asked, time.monotonic()))
        assert re.search("num_programs=24 .*ranks 0,2 / .*num_programs=28 .*ranks 1,3", decision.why)
    return times


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
    assert decision_of(ranks, "agree").num_programs == 24
    assert [(rank["agree"]["written"], rank["agree"]["sent"]) for rank in ranks] == [("", 0)] * 4
    assert verdict_of(ranks, "agree").exit_code == ExitCode.PASS


def test_ranks_with_different_numbers_of_multiprocessors_settle_on_one_grid_which_is_in_the_digest(
    ranks: Ranks,
) -> None:
    decision = decision_of(ranks, "multiprocessors")
    assert (decision.is_used, decision.num_programs) == (True, 114)
    for rank in ranks:
        choices = rank["multiprocessors"]["choices"]
        assert choices == {f"choice of {decision.label}": "used", f"launch of {decision.label}": f"{decision.says}"}
    assert re.fullmatch("used .*num_programs=114", decision.says)
    assert verdict_of(ranks, "multiprocessors").exit_code == ExitCode.PASS


REFUSED = {
    "one rank lacks it": "ranks 1,3: it is not registered here",
    "grids": "used with num_programs=24 on ranks 0,2 / used with num_programs=28 on ranks 1,3",
    "tables": "used with num_programs=24 on ranks 0,2 / reference (0.50 times the speed",
    "GPUs": "different GPUs: NVIDIA H200 on ranks 0,2 / NVIDIA H100 PCIe on ranks 1,3",
    "one rank does not ask": "ranks 1,3 did not decide in time",
}


@pytest.mark.parametrize(("case", "why"), REFUSED.items())
def test_where_one_rank_differs_all_use_the_reference_with_one_warning_on_stderr_that_names_it(
    ranks: Ranks, case: str, why: str
) -> None:
    """In a program that has not enabled the package in loguru."""
    decision = decision_of(ranks, case)
    assert (decision.is_used, decision.is_refused) == (False, True)
    assert why in decision.why
    (line,) = [line for rank in ranks for line in rank[case]["written"].splitlines()]
    start = "[rank 0] tpcompile fast paths, WARNING: all ranks use the reference of fast path norm for 256 tokens"
    assert line.startswith(start) and why in line


def test_a_planted_grid_is_named_within_a_second_of_the_last_question(ranks: Ranks) -> None:
    """The longest of 20; scripts/bench_decision.py has the times of 50, on eight ranks."""
    took = []
    for times in zip(*(rank["times"]["seconds"] for rank in ranks), strict=True):
        last_asked = max(asked for asked, _ in times)
        took.append(max(known for _, known in times) - last_asked)
    assert len(took) == 20 and max(took) < 1, took


@pytest.mark.parametrize(
    ("case", "values"), [("grids", ("num_programs=24", "num_programs=28")), ("tables", ("used", "reference"))]
)
def test_ranks_that_chose_differently_are_red_and_the_values_are_named(
    ranks: Ranks, case: str, values: tuple[str, str]
) -> None:
    verdict = verdict_of(ranks, case)
    (found,) = (found for found in verdict.divergences if found.is_red)
    assert found.title.startswith("choice of norm ")
    assert all(value in found.title for value in values)
    assert found.groups[0].ranks == (0, 2)


def test_the_report_lists_each_decision(ranks: Ranks) -> None:
    for case, status in (
        ("agree", "used: 1.50 times"),
        ("one rank lacks it", "refused: ranks 1,3: it is not registered"),
    ):
        details = [text for check in verdict_of(ranks, case).checks for text in check.details]
        assert any(text.startswith(f"{decision_of(ranks, case).label}: {status}") for text in details), details
    assert registered() == {}
