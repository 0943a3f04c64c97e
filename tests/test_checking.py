"""`capture` and `check` on real gloo ranks: a model of the user's own is green, or red for one rank; reports."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpcompile
from tests.forked import torchrun
from tpcompile.checking import Capture
from tpcompile.errors import ConfigError, DirectoryTakenError, DivergenceError, ExitCode
from tpcompile.evidence.records import DivergenceClass, Status
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.replay import replay
from tpcompile.ranks.store import RankStore
from tpcompile.testing import run_on_ranks

WORLD = 4


class Model(nn.Module):
    """A vocabulary-sharded embedding and a column/row pair."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens -> hidden."""
        hidden = self.embedding(tokens)
        return hidden + self.down(torch.relu(self.up(hidden)))


def _captured(mesh: DeviceMesh) -> Capture:
    model = Model()
    rows = RowwiseParallel(input_layouts=Replicate())
    plan = {"embedding": rows, "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    program = torch.compile(model, backend="aot_eager")
    with tpcompile.capture(mesh, watch=False) as run, run.phase("train step"):
        program(torch.zeros(2, 5, dtype=torch.int64)).sum().backward()
    return run


def _program(factor: float) -> Callable[[Tensor], Tensor]:
    torch.compiler.reset()
    return torch.compile(lambda x: x.sin() * factor, backend="eager")


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))


@pytest.mark.tp(world_size=WORLD)
def test_a_healthy_dtensor_model_is_green_on_every_rank_and_its_shard_bounds_are_listed(mesh: DeviceMesh) -> None:
    verdict = tpcompile.check(_captured(mesh), timeout_s=30)
    assert verdict.status == Status.PASS
    assert {d.cls for d in verdict.divergences} == {DivergenceClass.RANK_PARAMETRIC}
    assert set(verdict.domains) == {"tp 0-1", "tp 2-3"}, "groups of the axis are compared apart"


@pytest.mark.tp(world_size=WORLD)
def test_one_rank_with_a_different_constant_is_red_on_every_rank_and_named(mesh: DeviceMesh) -> None:
    scale = 3 if dist.get_rank() == WORLD - 1 else 2
    with tpcompile.capture(mesh, watch=False) as run:
        _program(scale)(torch.ones(2))
    verdict = tpcompile.check(run, timeout_s=30)
    assert verdict.exit_code == ExitCode.FAIL
    red = [d for d in verdict.divergences if d.is_red]
    assert red[0].domain == "tp 2-3"
    assert [g.ranks for g in red[0].groups] == [(2,), (3,)]
    assert red[0].title == "factor == 2 / 3"


class Experts(nn.Module):
    """A sum over the other axis, through the group that the mesh looks up by its name; a factor of the user's."""

    def __init__(self, mesh: DeviceMesh, key: str) -> None:
        super().__init__()
        self.mesh, self.key = mesh, key
        self.factors = {key: 2.0}

    def forward(self, x: Tensor) -> Tensor:
        """x -> its sum over the replicas, times the factor."""
        summed = funcol.all_reduce(x, "sum", self.mesh.get_group("dp"))
        return summed * self.factors[self.key]


@pytest.mark.tp(world_size=WORLD)
def test_a_group_of_the_other_axis_is_its_role_and_a_users_key_that_looks_like_its_name_is_not(
    mesh: DeviceMesh,
) -> None:
    """The ranks of one group of tp are in different groups of dp: the group's name is a key in a guard."""
    own = mesh.get_group("dp").group_name
    for key, exit_code in (("all", ExitCode.PASS), (f"rank {dist.get_rank()}", ExitCode.FAIL), (own, ExitCode.FAIL)):
        torch.compiler.reset()
        program = torch.compile(Experts(mesh, key), backend="eager")
        with tpcompile.capture(mesh, watch=False) as run:
            program(torch.ones(2))
        verdict = tpcompile.check(run, timeout_s=30)
        assert verdict.exit_code == exit_code, (key, verdict.summary)


def trained_by(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
    """Three steps, with gradients of ones."""
    for _ in range(3):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        step()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("num_breaks", "is_green"), [(0, False), (1, True), (2, False), (None, True)])
def test_as_many_graph_breaks_as_expected_are_green_and_one_more_or_fewer_are_red(
    num_breaks: int | None, is_green: bool
) -> None:
    """torch breaks the graph of a compiled `Optimizer.step` itself; the model beside it is compiled, too."""
    model = torch.compile(nn.Linear(4, 4), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    with tpcompile.capture(watch=False, num_breaks=num_breaks) as run:
        model(torch.ones(2, 4))
        trained_by(optimizer, step)
    verdict = tpcompile.check(run)
    red = {check.name: check for check in verdict.checks if check.is_red}
    assert bool(red) != is_green
    if num_breaks == 0:
        assert verdict.lead is not None and verdict.lead.do_first
        assert "in torch/optim/optimizer.py" in red["graph breaks"].observed
        regions = red["one region per call"]
        assert "torch/optim/optimizer.py" in regions.observed
        assert "hooks" not in f"{regions.observed} {regions.details}"


@pytest.mark.usefixtures("fresh_compiler")
def test_an_expected_break_does_not_hide_a_code_object_that_is_skipped_since_a_different_one() -> None:
    def leaves_graph(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    def layer(x: Tensor) -> Tensor:
        return x.sin() * 2

    def loops(x: Tensor, is_debugged: bool) -> Tensor:
        for _ in range(2):
            x = layer(x)
            if is_debugged:
                torch._dynamo.graph_break()
        return x

    compiled, looping = torch.compile(leaves_graph, backend="eager"), torch.compile(loops, backend="eager")
    looping(torch.ones(2), True)
    with tpcompile.capture(watch=False, num_breaks=None, alone=True) as run:
        compiled(torch.ones(2))
    assert tpcompile.check(run).exit_code == ExitCode.PASS
    with tpcompile.capture(watch=False, num_breaks=1, alone=True) as run:
        compiled(torch.ones(3))
        looping(torch.ones(2), False)
    assert tpcompile.check(run).exit_code == ExitCode.FAIL


@pytest.mark.usefixtures("fresh_compiler")
def test_a_guard_of_the_users_that_fails_in_every_call_comes_before_a_break_in_torch() -> None:
    """PyTorch's recipe for a compiled optimizer with a scheduler, and a number of the user's that changes."""
    optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
    tags = iter(["first", "second", "third"])

    def step(tag: str) -> None:
        if tag:
            optimizer.step()
        scheduler.step()

    compiled = torch.compile(step, backend="eager")
    with tpcompile.capture(watch=False) as run:
        trained_by(optimizer, lambda: compiled(next(tags)))
    verdict = tpcompile.check(run)
    assert verdict.exit_code == ExitCode.FAIL and verdict.lead is not None
    assert re.search(r" 2 times .*tag == 'first' \('first', 'second'\)", verdict.lead.says)
    assert verdict.lead.line is not None and verdict.lead.line.file.endswith("test_checking.py")


@pytest.mark.parametrize("num_breaks", [-1, True, "1", 1.0])
def test_a_number_of_graph_breaks_that_is_none_is_refused(num_breaks: Any) -> None:
    with pytest.raises(ConfigError, match="num_breaks="):
        tpcompile.capture(watch=False, num_breaks=num_breaks)


def _left(waits: bool) -> tuple[float, float]:
    """When this rank let the store go, and when `check` came back; rank 1 reads its verdict a second late."""
    let_go: list[float] = []
    leave = RankStore.leave_together

    def late(store: RankStore, *, timeout_s: float) -> None:
        if store.rank == 1:
            time.sleep(1.0)
        let_go.append(time.time())
        if waits:
            leave(store, timeout_s=timeout_s)

    RankStore.leave_together = late  # type: ignore[method-assign]  # in a rank's process, which ends with this test
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    tpcompile.check(tpcompile.capture(mesh, watch=False), timeout_s=30)
    return let_go[0], time.time()


@pytest.mark.parametrize("waits", [True, False])
def test_rank_0_which_may_serve_the_store_comes_back_after_the_last_rank_has_let_it_go(waits: bool):
    (_, first_back), (last_let_go, _) = run_on_ranks(_left, waits, world_size=2)
    assert (first_back > last_let_go) == waits


def _published(folder: str) -> dict[str, Any]:
    """What this rank prints and writes of a red verdict."""
    rank = dist.get_rank()
    with tpcompile.capture(watch=False) as run:
        _program(1.5 + rank)(torch.ones(2))
    verdict = tpcompile.check(run, timeout_s=30)
    printed = io.StringIO()
    verdict.print(Console(file=printed, width=100))
    os.environ["GITHUB_ACTIONS"] = "true"
    os.environ["GITHUB_STEP_SUMMARY"] = f"{folder}/summary.md"
    with redirect_stdout(io.StringIO()) as annotations:
        verdict.publish(f"{folder}/run")
    try:
        verdict.raise_for_status()
    except DivergenceError as error:
        raised = (str(error), int(error.exit_code))
    assert "FAIL (exit 1)" in str(verdict)
    return {"printed": printed.getvalue(), "annotations": annotations.getvalue(), "raised": raised}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("published")
    return run_on_ranks(_published, str(folder)), folder


def test_the_first_rank_prints_the_verdict_and_annotates_and_no_other(published: tuple[list[dict[str, Any]], Path]):
    (first, second), _ = published
    assert "factor == 1.5 / 2.5" in first["printed"] and "test_checking.py" in first["printed"]
    assert "::error file=tests/test_checking.py" in first["annotations"]
    assert second["printed"] == second["annotations"] == ""


def test_a_published_verdict_has_all_reports_and_is_judged_again_alike(
    published: tuple[list[dict[str, Any]], Path],
) -> None:
    _, folder = published
    run = RunDir(folder / "run")
    assert "factor == 1.5 / 2.5" in run.junit.read_text()
    assert "factor == 1.5 / 2.5" in (folder / "summary.md").read_text().replace("\\", "")
    again, first = replay(run), run.read_verdict()
    assert first is not None and (again.summary, again.checks) == (first.summary, first.checks)


def test_a_red_verdict_raises_on_all_ranks_with_its_exit_code(published: tuple[list[dict[str, Any]], Path]) -> None:
    texts = {rank["raised"] for rank in published[0]}
    ((text, code),) = texts
    assert code == 1 and "factor == 1.5 / 2.5" in text


def test_a_program_without_a_process_group_is_one_rank() -> None:
    with tpcompile.capture(alone=True) as run:
        _program(1.5)(torch.ones(2))
    verdict = tpcompile.check(run).raise_for_status()
    assert verdict.world_size == 1 and "between ranks" in verdict.summary


def test_one_rank_that_was_not_meant_to_be_alone_is_incomplete_also_when_it_is_judged_again(tmp_path: Path) -> None:
    """`python train.py` instead of torchrun: nothing was compared."""
    with tpcompile.capture() as run:
        _program(1.5)(torch.ones(2))
    verdict = tpcompile.check(run)
    assert (verdict.exit_code, verdict.lead) == (ExitCode.INCOMPLETE, None)
    with pytest.raises(DivergenceError) as raised:
        verdict.raise_for_status()
    assert raised.value.exit_code == ExitCode.INCOMPLETE
    assert replay(RunDir(verdict.publish(tmp_path / "run"))).exit_code == ExitCode.INCOMPLETE


def test_a_program_that_compiles_nothing_is_not_green() -> None:
    verdict = tpcompile.check(tpcompile.capture())
    assert verdict.exit_code == ExitCode.NOTHING_COMPILED
    with pytest.raises(DivergenceError) as raised:
        verdict.raise_for_status()
    assert raised.value.exit_code == ExitCode.NOTHING_COMPILED


def test_a_graph_break_is_red_without_any_phase() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    torch.compiler.reset()
    with tpcompile.capture() as run:
        torch.compile(broken, backend="eager")(torch.ones(2))
    verdict = tpcompile.check(run)
    (check,) = (check for check in verdict.checks if check.name == "graph breaks")
    assert check.is_red and check.line is not None and check.line.code == "torch._dynamo.graph_break()"


def test_a_directory_that_holds_a_verdict_is_refused(tmp_path: Path) -> None:
    with tpcompile.capture() as run:
        _program(1.5)(torch.ones(2))
    tpcompile.check(run).publish(tmp_path)
    with pytest.raises(DirectoryTakenError, match="--run-dir"):
        tpcompile.check(run).publish(tmp_path)


@pytest.mark.tp(world_size=2)
def test_declared_ops_reach_the_check_beside_the_sentinel_that_reads_them_first() -> None:
    names = (name for name in ("mine::norm",))
    assert tpcompile.capture(tp_aware=names).tp_aware == ("mine::norm",)


LEAVES_ONE_OUT = """
import torch, torch.distributed as dist, tpcompile

dist.init_process_group("gloo")
rank = dist.get_rank()
step = torch.compile(lambda x: x.sin(), backend="eager")
with tpcompile.capture() as run:
    for number in range(4):
        x = step(torch.ones(2))
        if rank == 0 or number < 2:
            dist.all_reduce(x)  # the line
    dist.all_reduce(torch.ones(3))
tpcompile.check(run).print()
"""


@pytest.mark.slow
def test_a_missing_collective_ends_the_job_with_its_line_where_the_capture_watches(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(LEAVES_ONE_OUT)
    done = torchrun([script], cwd=tmp_path, timeout_s=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "job.py:11" in done.stderr and "all_reduce" in done.stderr
