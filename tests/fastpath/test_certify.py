"""How a fast path is tried: ranks in turn, fences, mutations; and what each of them catches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from loguru import logger
from torch import Tensor

from tpcompile.errors import ConfigError, DivergenceError, FastPathError
from tpcompile.evidence.records import UserLine
from tpcompile.fastpath import certificate, fast_path, registered, registry
from tpcompile.fastpath.certificate import Kind
from tpcompile.fastpath.certify import Case, Refusal, certify, proof, trial
from tpcompile.fastpath.certify.fences import far_apart, fenced, fenced_allocations, spaced
from tpcompile.fastpath.certify.mutate import argument_mutations, source_mutations
from tpcompile.fastpath.certify.trials import one_by_one
from tpcompile.layout import Part, ShardSpec
from tpcompile.ranks.children import Ended

WIDTH = ShardSpec(dim=1, parts=(Part(8),))


@pytest.fixture(autouse=True)
def no_fast_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """And launchers of three lines have mutations enough."""
    monkeypatch.setattr(certificate, "MIN_MUTATIONS", 10)
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr("tpcompile.fastpath.certify.trials._TRIALS", {})


def plain_norm(x: Tensor, weight: Tensor, eps: float, all_reduce: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    mean = all_reduce(x.double().square().sum(-1, keepdim=True)) / 8
    return (x * torch.rsqrt(mean + eps) * weight).to(x.dtype)


def norm(x: Tensor, weight: Tensor, eps: float, all_reduce: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    total = all_reduce((x * x).sum(-1, keepdim=True))
    return x * torch.rsqrt(total / 8 + eps) * weight


def local_norm(x: Tensor, weight: Tensor, eps: float, all_reduce: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def cases(tp: int, skew: float = 3.0) -> list[Case]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 8, generator=generator, dtype=torch.float64) * torch.logspace(-skew, 0, 8, dtype=torch.float64)
    weight = ShardSpec(dim=0, parts=(Part(8),))
    arguments = {"x": x, "weight": torch.linspace(0.5, 2, 8, dtype=torch.float64), "eps": 1e-3}
    return [Case(name="skewed", arguments=arguments, shards={"x": WIDTH, "weight": weight}, outputs=(WIDTH,))]


def declare(launcher: Callable[..., Tensor], trial_cases: Callable[[int], list[Case]] = cases, **options: Any) -> None:
    declared = {"tp": "distributed_stats", "autograd": True, "dtypes": (torch.float32,)} | options
    fast_path("norm", replaces=plain_norm, **declared)(launcher)
    trial("norm")(trial_cases)


def test_a_right_one_is_certified_forward_and_backward_with_all_its_mutations_caught() -> None:
    declare(norm)
    proved = certify("norm", tp_sizes=(2, 1, 4))
    assert (proved.tp_sizes, proved.num_cases, proved.dtypes) == ((1, 2, 4), 3, ("float32",))
    assert proved.power.num_mutations >= 10 and proved.power.survivors == (), proved.power.survivors
    assert proved.worst.ratio < 2.5 and proved.refusal(registered()["norm"].source.sha256) == ""


def test_a_norm_over_the_shard_is_reported_with_the_case_the_tensor_and_the_numbers() -> None:
    declare(local_norm)
    with pytest.raises(
        DivergenceError,
        match=r" norm: (output 0|grad x|grad weight) has [\d.e+]+ times .* skewed, tp [24], float32 \(limit 2\.5\)$",
    ):
        certify("norm", tp_sizes=(2, 4), num_mutations=0)


def test_cases_that_see_little_have_no_power() -> None:
    def blind(tp: int) -> list[Case]:
        (case,) = cases(tp)
        empty = {**case.arguments, "x": torch.empty(0, 8, dtype=torch.float64)}
        return [Case(name="no tokens", arguments=empty, shards=case.shards, outputs=case.outputs)]

    declare(norm, blind)
    proved = certify("norm", tp_sizes=(2,))
    assert "at least 95% are required" in proved.refusal(proved.source)
    assert any(survivor.change.startswith("all_reduce(") for survivor in proved.power.survivors)


def test_without_a_case_nothing_is_certified() -> None:
    declare(norm, lambda tp: [])
    with pytest.raises(ConfigError, match=r" norm .*no cases .*tp 1, 2$"):
        certify("norm", tp_sizes=(1, 2))


def test_a_survivor_has_the_kind_and_the_reason_that_are_declared() -> None:
    declare(norm, lambda tp: cases(tp, skew=0.0))
    (case,) = cases(1, skew=0.0)
    blind = [Case(name="no tokens", arguments={**case.arguments, "x": torch.empty(0, 8)}, outputs=(ShardSpec(),))]
    same, far = {"total / 8 -> *": "the same here"}, {"x * x -> x / x": "no token"}
    trial("norm", equivalent=same, unreached=far)(lambda tp: blind)
    power = certify("norm", tp_sizes=(1,)).power
    kinds = {survivor.change: (survivor.kind, survivor.reason) for survivor in power.survivors}
    assert kinds["x * x -> x / x"] == (Kind.UNREACHED, "no token")
    assert kinds["total / 8 -> total * 8"] == (Kind.EQUIVALENT, "the same here")
    assert set(kinds.values()) == {(Kind.UNREACHED, "no token"), (Kind.EQUIVALENT, "the same here"), (Kind.MISSED, "")}
    assert (power.num_wrong, power.num_reached) == (power.num_mutations - 1, power.num_mutations - 2)


def checked_norm(x: Tensor, weight: Tensor, eps: float, all_reduce: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    check_width(x)
    return norm(x, weight, eps, all_reduce)


def check_width(x: Tensor) -> None:
    if x.shape[-1] % 2:
        raise FastPathError("an odd width")


def refusals(device: torch.device) -> list[Refusal]:
    arguments = {"x": torch.ones(1, 3, device=device), "weight": torch.ones(3, device=device), "eps": 1e-3}
    return [Refusal(name="an odd width", arguments=arguments)]


def test_a_launcher_that_takes_what_it_must_refuse_is_reported() -> None:
    declare(norm)
    trial("norm", refusals=refusals)(cases)
    with pytest.raises(DivergenceError, match=r" norm .*odd width; .*FastPathError$"):
        certify("norm", tp_sizes=(2,), num_mutations=0)


def test_arguments_that_must_be_refused_catch_a_check_that_is_dropped() -> None:
    declare(checked_norm)
    dropped = "check_width(x) -> nothing"
    assert dropped in {survivor.change for survivor in certify("norm", tp_sizes=(2,)).power.survivors}
    trial("norm", refusals=refusals)(cases)
    assert dropped not in {survivor.change for survivor in certify("norm", tp_sizes=(2,)).power.survivors}


def test_with_more_cases_only_what_none_caught_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(checked_norm)
    before = certify("norm", tp_sizes=(2,))
    known = [before.power]
    monkeypatch.setattr(proof, "power_of", lambda path: known[0])
    ran: list[str] = []
    monkeypatch.setattr(proof, "_survives", lambda *given: ran.append(given[3].change))
    monkeypatch.setattr(proof, "in_children", in_this_process)
    again = certify("norm", tp_sizes=(2,), is_for_more_cases=True)
    assert ran == [survivor.change for survivor in before.power.survivors] and ran
    assert (again.power.num_mutations, again.power.survivors) == (before.power.num_mutations, ())
    known[0] = before.power.model_copy(update={"num_mutations": 3})
    with pytest.raises(ConfigError, match="different mutations"):
        certify("norm", tp_sizes=(2,), is_for_more_cases=True)


def test_how_many_mutations_have_run_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(checked_norm)
    monkeypatch.setattr(proof, "_PROGRESS_S", 0.0)
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    logger.enable("tpcompile")
    try:
        certify("norm", tp_sizes=(2,), num_mutations=3)
    finally:
        logger.disable("tpcompile")
        logger.remove(sink)
    assert [line.partition(" mutations")[0] for line in lines] == [f"norm: {number} of 3" for number in (1, 2, 3)]


def in_this_process(calls: list[Callable[[], Any]], **_: Any) -> list[Ended]:
    return [Ended(call()) for call in calls]


def computed_norm(
    x: Tensor, weight: Tensor, eps: float, all_reduce: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    return norm(x, weight, eps, all_reduce) * globals()["ONE"]


def test_a_source_that_does_not_say_what_runs_is_not_certified() -> None:
    declare(computed_norm)
    with pytest.raises(ConfigError, match=r"certified: .*computed_norm .*globals\(\)"):
        certify("norm", tp_sizes=(2,), num_mutations=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": "none"}, "is declared tp=none, so it is refused on shards: certify it with --tp 1"),
        ({}, "has no cases: declare them with @trial\\('norm'\\)"),
    ],
)
def test_what_cannot_be_certified_is_reported(options: dict[str, Any], message: str, monkeypatch: Any) -> None:
    declare(norm, **options)
    monkeypatch.setattr("tpcompile.fastpath.certify.trials._TRIALS", {})
    with pytest.raises(ConfigError, match=message):
        certify("norm")
    with pytest.raises(ConfigError, match=r"called other \(registered: norm\)"):
        certify("other")


def test_ranks_that_reduce_a_different_number_of_times_are_reported() -> None:
    def call(arguments: Mapping[str, Any], all_reduce: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        x = arguments["x"]
        return (all_reduce(x) if arguments["rank"] else x,)

    ranks = [{"x": torch.ones(2), "rank": rank} for rank in range(3)]
    with pytest.raises(DivergenceError, match=r"1 of 3 ranks .*0 times, .*one more"):
        one_by_one(call, ranks)


@pytest.mark.parametrize("written", [0.0, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_memory_around_and_between_rows_is_nan_and_a_write_there_is_found(dtype: torch.dtype, written: float) -> None:
    x = torch.arange(6, dtype=dtype).view(2, 3)
    assert torch.equal(fenced(x), x) and torch.equal(spaced(x), x) and spaced(x).stride() == (67, 1)
    for place, offset in ((fenced(x), 6), (spaced(x), 3)):
        assert place.as_strided((1,), (1,), place.storage_offset() + offset).isnan().all()
    with pytest.raises(DivergenceError, match="wrote outside"), fenced_allocations():
        y = torch.empty_like(x)
        y.as_strided((7,), (1,)).fill_(written)
    with fenced_allocations():
        assert torch.empty(2).isnan().all() and x.new_empty((2,)).isnan().all()


def test_rows_that_are_far_apart_take_little_memory() -> None:
    far = far_apart(torch.arange(6.0).view(1, 3, 2))
    assert far.stride(1) * 2 > 2**31 and torch.equal(far, torch.arange(6.0).view(1, 3, 2))


def test_every_place_of_a_function_is_mutated_with_its_line() -> None:
    found = {mutation.change: mutation.place for mutation in source_mutations({norm})}  # type: ignore[arg-type]
    line = norm.__code__.co_firstlineno
    assert found["x * x -> x / x"] == f"test_certify.py:{line + 1}"
    dropped = [
        change
        for change in found
        if change.startswith("all_reduce(") and change.endswith(" -> (x * x).sum(-1, keepdim=True)")
    ]
    assert len(dropped) == 1
    assert found["total / 8 + eps -> total / 8 - eps"] == f"test_certify.py:{line + 2}"
    assert any(change.endswith("torch.sqrt(total / 8 + eps)") for change in found)


def library_gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


ERF = "torch.nn.functional.gelu(x, approximate='tanh') -> torch.nn.functional.gelu(x)"


def test_of_a_library_call_each_option_is_left_out() -> None:
    changes = [mutation.change for mutation in source_mutations({library_gelu}, of_options=True)]  # type: ignore[arg-type]
    assert changes == [ERF]
    assert not list(source_mutations({library_gelu}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("at", "missed"), [(-3.0, []), (50.0, [ERF])], ids=["near -3", "where GELU is x"])
def test_a_library_call_is_tried_without_its_options(at: float, missed: list[str]) -> None:
    """GELU with erf in place of tanh: it differs by 11 % near -3, which a case must have."""
    x = at + torch.linspace(-0.1, 0.1, 200, dtype=torch.float64)
    fast_path("norm", replaces=library_gelu, tp="pointwise", dtypes=(torch.bfloat16,))(library_gelu)
    trial("norm")(lambda tp: [Case(name="all", arguments={"x": x}, outputs=(ShardSpec(),))])
    proved = certify("norm", tp_sizes=(1,))
    assert [survivor.change for survivor in proved.power.survivors] == missed
    assert not proved.launches_kernels


def test_what_a_caller_gets_wrong_is_tried_too() -> None:
    (case,) = cases(2)
    changes = {mutation.place: mutation for mutation in argument_mutations(case)}
    assert set(changes) == {"argument x", "argument weight", "argument eps"}
    ranks = [{"weight": rank, "eps": 1.0} for rank in range(2)]
    assert [rank["weight"] for rank in changes["argument weight"].spoil(ranks)] == [1, 0]
    assert [rank["eps"] for rank in changes["argument eps"].spoil(ranks)] == [2.0, 2.0]


def test_a_certificate_is_written_beside_the_launcher_and_read_back(tmp_path: Any) -> None:
    from dataclasses import replace

    declare(norm)
    path = replace(registered()["norm"], line=UserLine(file=str(tmp_path / "mine.py"), line=1, function="norm"))
    proved = certify("norm", tp_sizes=(2,), command="tpcompile certify norm")
    assert certificate.read(certificate.write(proved, path)) == proved
    assert certificate.uncertified(path) == ""
