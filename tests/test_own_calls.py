"""One rank evaluates, samples or checks alone while gradients are summed eagerly, on gloo ranks: listed, and green.

Each program runs under `capture` with its sentinel, so both judge it. The last ones are faults of the same form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

import tpcompile
from tpcompile.evidence.records.causes import Cause
from tpcompile.testing import run_on_ranks

LIMIT_S = 200
pytestmark = [pytest.mark.timeout(LIMIT_S + 60), pytest.mark.long]
STEPS = 5
SIZE, OTHER = 3, 5


class Job:
    """A model that is trained as under DDP: compiled without collectives, its gradients summed in eager."""

    def __init__(self, *, dynamic: bool | None = False, with_hooks: bool = False, reduces: bool = False) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.rank, self.with_hooks = dist.get_rank(), with_hooks
        self.net = Net(reduces=reduces)
        self.options: dict[str, Any] = {"backend": "eager", "dynamic": dynamic}
        self.program = torch.compile(self.net, **self.options)
        if with_hooks:
            for parameter in self.net.parameters():
                parameter.register_post_accumulate_grad_hook(_sum)

    def train(self, between: Callable[[int], None], *, sizes: dict[int, int] | None = None) -> None:
        """Some steps, each of its batch size, and what this rank does after it."""
        for number in range(STEPS):
            size = (sizes or {}).get(number, SIZE)
            self.program(torch.randn(size, 4)).pow(2).mean().backward()
            if not self.with_hooks:
                for parameter in self.net.parameters():
                    _sum(parameter)
            self.net.zero_grad()
            between(number)

    def evaluate(self, size: int = SIZE, program: Callable[[Tensor], Tensor] | None = None) -> None:
        """One batch without gradients."""
        call = self.program if program is None else program
        with torch.no_grad():
            call(torch.randn(size, 4))

    def only(self, rank: int, act: Callable[[], object], *, after: int = 2, every: bool = False) -> Any:
        """`act` on one rank, after one step or after every step."""

        def between(number: int) -> None:
            if self.rank == rank and (every or number == after):
                act()

        return between


class Net(nn.Module):
    def __init__(self, *, reduces: bool) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4)
        self.reduces = reduces

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.drop(torch.relu(self.up(x))))
        return funcol.all_reduce(y, "sum", dist.group.WORLD) if self.reduces else y


def _sum(parameter: Tensor) -> None:
    dist.all_reduce(parameter.grad)


# Healthy.


def under_no_grad() -> None:
    job = Job()
    job.train(job.only(0, job.evaluate))


def under_inference_mode_on_the_last_rank() -> None:
    job = Job()
    job.train(job.only(1, lambda: torch.inference_mode()(job.program)(torch.randn(SIZE, 4))))


def in_eval_mode() -> None:
    job = Job()

    def evaluate() -> None:
        job.net.eval()
        job.program(torch.randn(SIZE, 4))
        job.net.train()

    job.train(job.only(0, evaluate))


def with_a_different_batch_size() -> None:
    job = Job()
    job.train(job.only(0, lambda: job.program(torch.randn(OTHER, 4))))


def with_a_different_batch_size_made_dynamic() -> None:
    job = Job(dynamic=None)
    job.train(job.only(0, lambda: job.evaluate(OTHER)))


def by_a_second_compile_of_the_weights() -> None:
    job = Job()
    second = torch.compile(job.net, **job.options)
    job.train(job.only(0, lambda: job.evaluate(program=second)))


def after_every_step_with_sums_in_hooks() -> None:
    job = Job(with_hooks=True)
    job.train(job.only(0, job.evaluate, every=True))


def before_the_first_step() -> None:
    job = Job()
    if job.rank == 0:
        job.evaluate()
    job.train(lambda _: None)


def in_growing_sizes() -> None:
    job = Job()
    job.train(job.only(0, lambda: [job.evaluate(size) for size in range(4, 8)]))


def before_a_size_that_changes_on_all_ranks() -> None:
    """The later calls of rank 0 have other numbers than those of rank 1."""
    job = Job()
    job.train(job.only(0, job.evaluate, after=1), sizes={3: OTHER})


def as_in_training_before_a_size_that_changes_on_all_ranks() -> None:
    """The same without a compile that would show it."""
    job = Job()
    job.train(job.only(0, lambda: job.program(torch.randn(SIZE, 4)), every=True), sizes={3: OTHER})


# Faults.


def is_fed_differently() -> None:
    job = Job()
    job.train(lambda _: None, sizes={2: OTHER} if job.rank == 1 else {})


def is_fed_differently_after_an_evaluation() -> None:
    job = Job()
    job.train(job.only(0, job.evaluate, after=0), sizes={2: OTHER} if job.rank == 1 else {})


def evaluates_and_is_fed_differently() -> None:
    job = Job()
    job.train(job.only(0, job.evaluate, after=0), sizes={2: OTHER} if job.rank == 0 else {})


def communicates() -> None:
    """The evaluation issues a collective; a rank that does not evaluate happens to be in one of the same size."""
    job = Job(reduces=True)
    job.train(job.only(0, job.evaluate, after=STEPS - 1))
    if job.rank == 1:
        dist.all_reduce(torch.ones(SIZE, 4))


HEALTHY = (
    under_no_grad, under_inference_mode_on_the_last_rank, in_eval_mode, with_a_different_batch_size,
    with_a_different_batch_size_made_dynamic, by_a_second_compile_of_the_weights, after_every_step_with_sums_in_hooks,
    before_the_first_step, in_growing_sizes, before_a_size_that_changes_on_all_ranks,
    as_in_training_before_a_size_that_changes_on_all_ranks,
)  # fmt: skip
FED = {is_fed_differently: 1, is_fed_differently_after_an_evaluation: 1, evaluates_and_is_fed_differently: 0}
Results = list[dict[str, dict[str, Any]]]


def judged(program: Callable[[], None]) -> dict[str, Any]:
    """What the sentinel and `check` say of a program."""
    with tpcompile.capture(policy="warn") as run:
        program()
        if program in FED and run.sentinel is not None:
            run.sentinel.wait_for_finding(0)  # a real job goes on: a rank that leaves takes no part in what is settled
    verdict = tpcompile.check(run, timeout_s=30)
    assert run.sentinel is not None
    live = [(found.lead.cause, found.lead.ranks) for found in run.sentinel.findings if found.lead]
    late = [(verdict.lead.cause, verdict.lead.ranks)] if verdict.lead else []
    return {"live": live, "late": late, "listed": [d.cls for d in verdict.divergences if not d.is_red]}


def on_rank() -> dict[str, dict[str, Any]]:
    return {program.__name__: judged(program) for program in (*HEALTHY, *FED, communicates)}


@pytest.fixture(scope="module")
def results() -> Results:
    return run_on_ranks(on_rank, timeout_s=LIMIT_S)


@pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.__name__)
def test_a_call_that_one_rank_makes_alone_is_green(results: Results, program: Callable[[], None]) -> None:
    for rank in results:
        found = rank[program.__name__]
        assert (found["live"], found["late"]) == ([], [])
    has_compile = program is not as_in_training_before_a_size_that_changes_on_all_ranks
    assert ("label only" in results[0][program.__name__]["listed"]) == has_compile


@pytest.mark.parametrize("program", FED, ids=lambda program: program.__name__)
def test_a_rank_that_is_fed_differently_in_a_step_is_red(results: Results, program: Callable[[], None]) -> None:
    for rank in results:
        found = rank[program.__name__]
        assert found["live"] == found["late"] == [(Cause.SHAPE, (FED[program],))]


def test_a_call_of_one_rank_that_communicates_is_red(results: Results) -> None:
    for rank in results:
        assert rank["communicates"]["live"] and rank["communicates"]["late"]
