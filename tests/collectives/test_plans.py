"""The eager path without checks: taken for a call equal to a checked one, left when anything that matters differs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from tpcompile.collectives import api as tp
from tpcompile.collectives import asynchronous as later
from tpcompile.collectives import checks, plans
from tpcompile.collectives.observer import Call, observing
from tpcompile.errors import ConfigError
from tpcompile.ranks import per_group

CALLS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "all_reduce": lambda x, g: tp.all_reduce(x, group=g),
    "all_gather_single": lambda x, g: tp.all_gather_single(x, dim=0, group=g),
    "reduce_scatter_single": lambda x, g: tp.reduce_scatter_single(x, dim=0, group=g),
    "all_to_all_single": lambda x, g: tp.all_to_all_single(x, group=g),
    "broadcast": lambda x, g: tp.broadcast(x, src=1, group=g),
    "all_reduce_start": lambda x, g: later.all_reduce_start(x, group=g).wait(),
    "all_gather_start": lambda x, g: later.all_gather_start(x, dim=0, group=g).wait(),
    "reduce_scatter_start": lambda x, g: later.reduce_scatter_start(x, dim=0, group=g).wait(),
    "all_to_all_start": lambda x, g: later.all_to_all_start(x, group=g).wait(),
}
BY_SHAPE = [name for name in CALLS if name not in ("all_reduce", "broadcast", "all_reduce_start")]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Rank 1 of four pretended ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that went through the checks."""
    names: list[str] = []
    real = checks.checked

    def spy(name: str, *args: Any) -> Any:
        names.append(name)
        return real(name, *args)

    monkeypatch.setattr(checks, "checked", spy)
    return names


@pytest.mark.parametrize("name", CALLS)
def test_the_second_equal_call_is_not_checked_again(name: str, group: dist.ProcessGroup, checked: list[str]) -> None:
    first, second = (CALLS[name](torch.ones(8, 2), group) for _ in range(2))
    assert checked == [name]
    assert (first.shape, first.stride(), first.dtype) == (second.shape, second.stride(), second.dtype)


@pytest.mark.parametrize("name", CALLS)
def test_a_different_dtype_layout_or_group_is_checked(name: str, group: dist.ProcessGroup, checked: list[str]) -> None:
    x, other = torch.ones(8, 2), dist.new_group([0, 1, 2, 3])
    CALLS[name](x, group)
    CALLS[name](x.double(), group)
    CALLS[name](x, other)
    for wrong in (x.to_sparse(), x.to("meta"), x.short()):
        with pytest.raises(ConfigError):
            CALLS[name](wrong, group)
    assert checked == [name] * 6


@pytest.mark.parametrize("name", BY_SHAPE)
def test_a_different_shape_is_checked_where_it_counts(name: str, group: dist.ProcessGroup, checked: list[str]) -> None:
    CALLS[name](torch.ones(8, 2), group)
    assert CALLS[name](torch.ones(4, 3), group).shape[1] == 3
    assert checked == [name] * 2
    if "gather" not in name:
        with pytest.raises(ConfigError, match="not divisible"):
            CALLS[name](torch.ones(6, 2), group)


@pytest.mark.parametrize("name", CALLS)
def test_an_observer_and_a_mode_leave_it(name: str, group: dist.ProcessGroup, checked: list[str]) -> None:
    class Watcher:
        seen = 0

        def observe(self, call: Call, x: Tensor, run: Callable[[], Tensor]) -> Tensor:
            self.seen += 1
            return run()

    x, watcher = torch.ones(8, 2), Watcher()
    CALLS[name](x, group)
    with observing(watcher):
        CALLS[name](x, group)
    with FlopCounterMode(display=False):
        CALLS[name](x, group)
    assert watcher.seen == 1 and checked.count(name) == 3
    assert "_c10d_functional" in make_fx(lambda x: CALLS[name](x, group))(x).code


@pytest.mark.parametrize("name", [*CALLS, "copy_to_tp"])
def test_a_call_with_a_plan_has_its_gradient(name: str, group: dist.ProcessGroup, checked: list[str]) -> None:
    call = {**CALLS, "copy_to_tp": lambda x, g: tp.copy_to_tp(x, group=g)}[name]
    call(torch.ones(8, 2), group)
    x = torch.ones(8, 2, requires_grad=True)
    names = [type(call(x, group).grad_fn).__name__ for _ in range(2)]
    with_checks = call(x, dist.new_group([0, 1, 2, 3])).grad_fn
    assert with_checks is not None and names == [type(with_checks).__name__] * 2
    is_checked_again = name.endswith("_start") or name == "all_to_all_single"
    assert checked.count(name) == (4 if is_checked_again else 2)
    with torch.no_grad():
        assert not call(x, group).requires_grad or name == "copy_to_tp"


def test_a_product_never_has_a_plan(group: dist.ProcessGroup) -> None:
    x = torch.ones(8, 2)
    tp.all_reduce(x, group=group, op="product")
    with pytest.raises(ConfigError, match="no gradient"):
        tp.all_reduce(x.requires_grad_(), group=group, op="product")


@pytest.mark.parametrize("name", CALLS)
def test_the_input_is_left_alone_whatever_its_strides_and_lazy_sign(name: str, group: dist.ProcessGroup) -> None:
    CALLS[name](torch.ones(8, 1), group)
    negated = torch._neg_view(torch.ones(8, 1))
    assert negated.contiguous().is_neg(), "contiguous() alone would let the wrong sign travel"
    for x in (torch.ones(1, 8).t(), torch.ones(8, 2)[:, :1], negated):
        before = x.clone()
        y = CALLS[name](x, group)
        assert torch.equal(x, before) and y.is_contiguous() and not y.is_neg() and type(y) is Tensor


def test_what_cannot_be_a_key_is_refused_like_any_mistake(group: dist.ProcessGroup) -> None:
    any_: Any = tp
    any_.all_reduce(torch.ones(2), group=group)
    with pytest.raises(ConfigError, match="is unknown"):
        any_.all_reduce(torch.ones(2), group=group, op=["sum"])
    with pytest.raises(ConfigError, match="src="):
        any_.broadcast(torch.ones(2), group=group, src=[0])


def test_a_result_in_flight_is_given_once(group: dist.ProcessGroup) -> None:
    for _ in range(2):
        pending = later.all_reduce_start(torch.ones(2), group=group)
        pending.wait()
        with pytest.raises(ConfigError, match="called twice"):
            pending.wait()


def test_plans_die_with_their_group() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    world = dist.group.WORLD
    tp.all_reduce(torch.ones(2), group=world)
    key = id(world)
    assert any(plan[0] == key for plan in per_group.KEPT)
    dist.destroy_process_group()
    del world
    gc.collect()
    assert key not in per_group._GROUPS and not any(plan[0] == key for plan in per_group.KEPT)


def test_plans_do_not_pile_up_for_ever_new_shapes(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_group, "_MAX_KEPT", 8)
    for size in range(1, 30):
        tp.all_gather_single(torch.ones(size), dim=0, group=group)
        assert plans.plan_of_shape(torch.ones(size), group, "all_gather_single", "R") == (4 * size,)
    assert len(per_group.KEPT) <= 8


def _values() -> dict[str, list[Tensor]]:
    """Every call on real ranks: checked, by its plan, with other strides, a lazy sign, and under torch's coalescing."""
    g, found = dist.group.WORLD, {}
    x = torch.arange(8.0).view(4, 2) * (dist.get_rank() + 1)
    for name, call in CALLS.items():
        results = [call(x, g), call(x, g), call(x.t().contiguous().t(), g), call(torch._neg_view(-x), g)]
        with dist.distributed_c10d._coalescing_manager(group=g):
            results.append(call(x, g).clone())
        found[name] = results
    return found


def _reference(name: str, rank: int) -> Tensor:
    xs = [torch.arange(8.0).view(4, 2) * (r + 1) for r in range(2)]
    if "gather" in name:
        return torch.cat(xs)
    if "scatter" in name:
        return sum(xs).chunk(2)[rank]
    if "all_to_all" in name:
        return torch.cat([x.chunk(2)[rank] for x in xs])
    return xs[1] if name == "broadcast" else sum(xs)


@pytest.mark.tp(world_size=2)
def test_values_by_a_plan_are_those_of_the_checked_call() -> None:
    for name, results in _values().items():
        assert all(torch.equal(y, _reference(name, dist.get_rank())) for y in results), name


@pytest.mark.tp(world_size=2)
def test_the_debug_wrapper_of_torch_still_compares_shapes() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    x, group = torch.ones(4), dist.new_group()
    tp.all_reduce(x, group=group)
    with pytest.raises(RuntimeError, match=r"(?i)mismatch"):
        tp.all_reduce(x if dist.get_rank() else x[:2], group=group)
