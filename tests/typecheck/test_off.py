"""The check leaves nothing behind: compiled graphs and guards do not depend on it."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.graphs import GraphCapture
from tests.typecheck.broken import missing_copy
from tests.typecheck.programs import MLP, PLAIN, TOKENS, WIDTH, built, mlp
from tpcompile.collectives import all_reduce
from tpcompile.collectives.observer import active
from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import ConfigError
from tpcompile.pytest_plugin.fixture import TensorParallel
from tpcompile.typecheck import SpmdTypeMode, check_module, check_types, fake_ranks, parse_type


def _inputs() -> Tensor:
    return torch.ones(2, TOKENS, WIDTH, requires_grad=True)


def _compiled(group: Any) -> tuple[list[tuple[str, str]], list[str]]:
    """Graphs and guards of one training step of the MLP."""
    torch._dynamo.reset()
    capture, guards = GraphCapture(), []

    def keep(entries: Any) -> list[bool]:
        # Dynamo numbers its own globals per process.
        guards.extend(sorted(re.sub(r"_c?\d+", "_N", f"{e.guard_type} {e.name}") for e in entries))
        return [True] * len(entries)

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        return capture(graph, inputs)

    module = built(mlp, **MLP)(Collectives(group))
    compiled = torch.compile(module, backend=backend, fullgraph=True, options={"guard_filter_fn": keep})
    compiled(_inputs()).sum().backward()
    return capture.texts, guards


def test_graphs_and_guards_are_the_same_before_and_after_a_check() -> None:
    with fake_ranks(4) as group:
        before = _compiled(group)
        report = check_module(built(mlp, **MLP)(Collectives(group)), (_inputs(),), group=group)
        after = _compiled(group)
    assert report.num_ops > 0 and report.finding is None
    assert [kind for kind, _ in before[0]] == ["dynamo", "forward", "backward"] and before[1]
    assert before[0] == after[0] and before[1] == after[1]
    named = re.compile(r"observer|\bactive\b|tpcompile.typecheck")
    assert not [text for text in [*before[1], *(text for _, text in before[0])] if named.search(text)]


def test_nothing_stays_registered() -> None:
    hook = sys.excepthook
    assert check_types(built(missing_copy, **PLAIN), (_inputs(),)).finding is not None
    assert active.observer is None and not dist.is_initialized() and sys.excepthook is hook
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.nn.modules.module._global_forward_pre_hooks and not torch.nn.modules.module._global_forward_hooks


def test_nothing_stays_registered_when_the_program_fails() -> None:
    def failing(m: Any, x: Tensor) -> Tensor:
        raise LookupError("own")

    with pytest.raises(LookupError, match="own"):
        check_types(built(failing), (_inputs(),))
    assert active.observer is None and not dist.is_initialized() and torch._C._len_torch_dispatch_stack() == 0


def test_the_callers_tensors_stay_as_they_are() -> None:
    with fake_ranks(2) as group:
        module, x = built(mlp, **MLP)(Collectives(group)), torch.ones(2, TOKENS, WIDTH)
        before = {name: parameter.clone() for name, parameter in module.named_parameters()}
        check_module(module, (x,), group=group, input_types=("I",))
        for name, parameter in module.named_parameters():
            assert parameter.requires_grad and parameter.grad is None and torch.equal(parameter, before[name])
    assert not x.requires_grad


def test_a_compiled_module_is_followed_in_eager() -> None:
    with fake_ranks(4) as group:
        module = torch.compile(built(missing_copy, **PLAIN)(Collectives(group)), backend="eager")
        report = check_module(module, (_inputs(),), group=group)
    assert report.finding is not None and report.finding.rule == "missing-copy"
    assert report.finding.site.source.endswith("# here")


def test_the_mode_alone_follows_a_block_of_code() -> None:
    with fake_ranks(4) as group:
        x = torch.ones(3)
        with SpmdTypeMode(group) as mode:
            mode.declare(x, parse_type("P", ndim=1, grad=True))
            y = all_reduce(x + x, group=group)
            whole = mode.type_of(y)
            all_reduce(x, group=group)  # dropped
        assert (whole.kind, whole.grad) == ("I", True)
        assert [(v.rule, v.site.source) for v in mode.violations] == [
            ("result-dropped", "all_reduce(x, group=group)  # dropped")
        ]


def test_a_second_observer_is_refused() -> None:
    with fake_ranks(2) as group, SpmdTypeMode(group), pytest.raises(ConfigError, match="observer"):
        SpmdTypeMode(group).__enter__()
    assert active.observer is None


def test_parameters_without_a_declaration_can_be_given_types() -> None:
    def build(comm: Collectives) -> torch.nn.Module:
        return built(mlp, **{name: (shape, None) for name, (shape, _) in MLP.items()})(comm)

    given = {"up*": "V(0)", "down": "V(-1)"}
    assert check_types(build, (_inputs(),)).finding is not None, "replicated weights of a shard's size"
    assert check_types(build, (_inputs(),), parameter_types=given).finding is None
    with pytest.raises(ConfigError, match=r"'wq'.* up, up_bias, down, bias"):
        check_types(build, (_inputs(),), parameter_types={"wq": "V(0)"})


def test_a_frozen_parameter_needs_no_copy() -> None:
    def build(comm: Collectives) -> torch.nn.Module:
        return built(missing_copy, **PLAIN)(comm).requires_grad_(False)

    x = torch.ones(2, TOKENS, WIDTH)
    assert check_types(build, (x,)).finding is None
    assert check_types(build, (x,), input_types=("I",)).finding is not None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"input_types": ("I", "I")}, "2 entries for 1 input"),
        ({"output_type": ("I", "I")}, "2 entries for 1 output"),
        ({"input_types": ("Q",)}, "unknown"),
        ({"tp": 1}, "nothing to check"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_types(built(mlp, **MLP), (_inputs(),), **options)


@pytest.mark.tp(world_size=2)
def test_real_ranks_can_be_checked_and_fake_ones_are_refused_there(tp: TensorParallel) -> None:
    torch.manual_seed(0)
    right, wrong = built(mlp, **MLP)(tp.comm), built(missing_copy, **PLAIN)(tp.comm)
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    expected = right(x)
    seen: list[Tensor] = []
    right.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    clean = check_module(right, (x,), group=tp.comm.group)
    assert clean.is_complete and clean.finding is None and torch.equal(seen[0], expected)
    found = check_module(wrong, (x,), group=tp.comm.group)
    assert found.finding is not None
    assert (found.finding.rule, found.ranks) == ("missing-copy", (tp.rank,))
    with pytest.raises(ConfigError, match=f"rank {tp.rank} .*check_module"):
        check_types(built(mlp, **MLP), (x,), tp=2)
