"""The private torch API of `tpcompile/torch_api/c10d.py`: red when torch moves a name or a signature."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import destroy_process_group as imported_before
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tpcompile import collectives as tp
from tpcompile.errors import ConfigError
from tpcompile.ranks import groups
from tpcompile.ranks.groups import neighbours
from tpcompile.testing import run_on_ranks
from tpcompile.torch_api import c10d


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Rank 1 of four pretended ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("all_reduce", ["input", "reduce_op", "group_name"]),
        ("all_gather_into_tensor", ["input", "group_size", "group_name"]),
        ("reduce_scatter_tensor", ["input", "reduce_op", "group_size", "group_name"]),
        ("all_to_all_single", ["input", "output_split_sizes", "input_split_sizes", "group_name"]),
        ("broadcast", ["input", "src", "group_name"]),
        ("wait_tensor", ["tensor"]),
    ],
)
def test_functional_ops_have_the_signature_we_call(op: str, arguments: list[str]) -> None:
    schema = getattr(c10d.ops, op).default._schema
    assert [argument.name for argument in schema.arguments] == arguments


def test_tracing_is_seen_under_make_fx_fake_tensors_and_dynamo_and_not_in_eager() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(c10d.is_tracing())
        return x * 1

    x = torch.ones(2)
    look(x)
    make_fx(look)(x)
    make_fx(look, tracing_mode="symbolic")(x)
    with FakeTensorMode():
        look(torch.ones(2))
    assert seen == [False, True, True, True]
    compiled = torch.compile(lambda x: x * (2 if c10d.is_tracing() else 3), backend="eager", fullgraph=True)
    assert compiled(x).tolist() == [2, 2]


def test_an_unrelated_dispatch_mode_is_not_tracing() -> None:
    with FlopCounterMode(display=False):
        assert c10d.num_modes() > 0 and not c10d.is_tracing()


def test_collectives_are_functional_ops_under_any_mode_but_one_that_only_looks(group: dist.ProcessGroup) -> None:
    class Looks(TorchDispatchMode):
        sees_in_place_ops = True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    seen = [c10d.is_functional()]
    with Looks():
        seen.append(c10d.is_functional())
        with FlopCounterMode(display=False):
            seen.append(c10d.is_functional())
    with FakeTensorMode():
        seen.append(c10d.is_functional())
    assert seen == [False, False, True, True]


def test_a_group_is_found_by_its_name_and_knows_its_devices(group: dist.ProcessGroup) -> None:
    assert c10d.group_of_name(group.group_name) is group
    assert (group, group.group_name) in c10d.known_groups()
    assert c10d.has_backend(group, torch.device("cpu"))
    assert not c10d.has_backend(group, torch.device("meta"))


def test_the_mark_of_a_rank_outside_a_group_is_recognised(group: dist.ProcessGroup) -> None:
    outside = dist.new_group([0])
    assert c10d.is_non_member(outside) and not c10d.is_non_member(group)
    with pytest.raises(ConfigError, match="NON_GROUP_MEMBER"):
        tp.all_reduce(torch.ones(2), group=outside)


def test_direct_calls_take_the_callers_stream_and_give_owned_buffers(group: dist.ProcessGroup) -> None:
    x = torch.ones(4, 2)
    assert not c10d._ALL_REDUCE["sum", False].asyncOp and c10d._ALL_REDUCE["sum", True].asyncOp
    results = [
        c10d.begin_all_reduce(x, "sum", group),
        c10d.begin_all_gather(x, group),
        c10d.begin_reduce_scatter(x, group),
        c10d.begin_all_to_all(x, [1] * 4, [1] * 4, group),
        c10d.begin_broadcast(x, 0, group),
    ]
    shapes = [tuple(c10d.end(*one).shape) for one in results]
    assert shapes == [(4, 2), (16, 2), (1, 2), (4, 2), (4, 2)]
    assert all(raw.data_ptr() != x.data_ptr() for raw, _ in results)


def test_without_the_copy_of_the_result_old_dynamo_loses_the_gradient(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = []
    for exposes in (torch.__version__ < "2.13", False):
        assert not exposes or c10d._EXPOSES_INTERMEDIATES
        monkeypatch.setattr(c10d, "_EXPOSES_INTERMEDIATES", exposes)
        torch._dynamo.reset()
        x = torch.ones(4, requires_grad=True)
        step = torch.compile(lambda x: tp.all_reduce(x * 2, group=group), backend="eager", fullgraph=True)
        step(x).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.tolist())
    assert gradients == [[2.0] * 4, [2.0 * (torch.__version__ >= "2.13")] * 4]


def test_the_hot_path_is_left_for_a_gradient_and_under_a_trace(group: dist.ProcessGroup) -> None:
    x = torch.ones(2)
    tp.all_reduce(x, group=group)
    assert tp.all_reduce(x.clone().requires_grad_(), group=group).requires_grad
    assert "_c10d_functional" in make_fx(lambda x: tp.all_reduce(x, group=group))(x).code


def test_rank_as_data_survives_inference_mode(group: dist.ProcessGroup) -> None:
    groups._RANK_INDEX.clear()
    with torch.inference_mode():
        first = tp.rank_index(group, torch.device("cpu"))
    assert first.tolist() == [1] and not first.is_inference()
    assert tp.rank_index(None, torch.device("cpu")).tolist() == [0]


def test_a_group_gets_the_name_it_was_asked_for_and_torch_keeps_choosing_the_others(group: dist.ProcessGroup) -> None:
    named = c10d.new_named_group([0, 1], "mine", "role")
    assert (named.group_name, named.group_desc, named.size()) == ("mine", "role", 2)
    assert dist.new_group([0, 1]).group_name != "mine"


def test_groups_are_noted_in_order_but_for_those_that_their_members_make_alone(group: dist.ProcessGroup) -> None:
    with c10d.groups_made() as made:
        dist.new_group([1])
        dist.new_group([0], group_desc="mine")
        dist.new_group([0], use_local_synchronization=True)
    dist.new_group([0])
    assert [(one.name, one.ranks) for one in made] == [("", (1,)), ("mine", (0,))]
    assert [one.line is not None and one.line.function for one in made] == [
        "test_groups_are_noted_in_order_but_for_those_that_their_members_make_alone"
    ] * 2


def test_replica_groups_do_not_outlive_their_group() -> None:
    names = []
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
        world = dist.group.WORLD
        found = neighbours(world, 2)
        assert found is neighbours(world, 2) and found is not None and found.size() == 2
        assert dist.get_process_group_ranks(found) == [2, 3]
        names.append(found.group_name)
        dist.destroy_process_group()
        del world, found
    assert len(set(names)) == 2


def seen_at_each_end() -> list[bool]:
    """Whether the default group still existed, at each call."""
    seen: list[bool] = []
    undo = c10d.before_shutdown(lambda: seen.append(dist.is_initialized()))
    pair = dist.new_group([0, 1])
    dist.barrier(pair)  # gloo connects on each rank: one that destroys its end at once cuts the other's connection
    dist.destroy_process_group(pair)
    imported_before()
    undo()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # which the end of a rank destroys
    return seen


def test_it_is_called_for_every_group_that_ends_while_groups_exist() -> None:
    assert run_on_ranks(seen_at_each_end) == [[True, True]] * 2
