"""Selective activation checkpointing in eager, two ranks: every collective keeps its gradient, whatever is saved."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.collectives.forms import FORMS, x_shape
from tpcompile.collectives import api as tp
from tpcompile.collectives.strategies import Collectives
from tpcompile.config import load
from tpcompile.nn.block import TransformerStack
from tpcompile.numerics.check import check_program
from tpcompile.numerics.draw import draw_inputs
from tpcompile.numerics.single_device import Reference
from tpcompile.testing import run_on_ranks
from tpcompile.torch_api import c10d

SAVES = ("c10d", "_c10d_functional", "everything")
BLOCK = load("cpu_smoke").block


def _policy(saves: str, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = saves in (op.namespace, "everything")
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(saves: str) -> Any:
    return functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, saves))


def _input(name: str) -> Tensor:
    rank, form = dist.get_rank(), FORMS[name]
    generator = torch.Generator().manual_seed(rank if form.takes == "V" else 9)
    return torch.randn(x_shape(form, rank, 2), dtype=torch.float64, generator=generator).requires_grad_()


def _gradient(name: str, saves: str | None) -> Tensor:
    def region(x: Tensor) -> Tensor:
        # Two ops behind the collective need its result again, so it is recomputed, or taken from what was saved.
        return FORMS[name].call(x * 2, dist.group.WORLD).sin().exp()

    x = _input(name)
    y = region(x) if saves is None else checkpoint(region, x, use_reentrant=False, context_fn=_contexts(saves))
    (y * y).sum().backward()
    assert x.grad is not None
    return x.grad


def _wrong_forms() -> list[tuple[str, str]]:
    found = []
    for name in FORMS:
        expected = _gradient(name, None)
        found += [(name, saves) for saves in SAVES if not torch.equal(_gradient(name, saves), expected)]
    return found


class _Ran(TorchDispatchMode):
    """Counts the collectives that ran: below the checkpoint's mode, which passes on no op that it has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.ops[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def _num_all_reduces(saves: str | None) -> int:
    with _Ran() as ran:
        _gradient("all_reduce sum I", saves)
    return ran.ops["all_reduce"]


class _Block(nn.Module):
    """A stack of blocks whose forward is checkpointed as a whole."""

    def __init__(self, comm: Collectives, saves: str) -> None:
        super().__init__()
        self.inner, self.contexts = TransformerStack(BLOCK, comm, num_layers=BLOCK.num_layers), _contexts(saves)

    def forward(self, *inputs: Tensor) -> Tensor:
        return checkpoint(self.inner, *inputs, use_reentrant=False, context_fn=self.contexts)


def _wrong_of_block(saves: str) -> dict[str, str]:
    """Tensors of a checkpointed stack that differ from the single-device ones, in float64's terms."""
    reference = Reference(
        lambda comm: _Block(comm, saves),
        lambda dtype: draw_inputs(BLOCK, seed=1, device="cpu", dtype=dtype, seq_len=BLOCK.seq_len)[:3],
        dtype=torch.float32, differentiate=["input"],
    )  # fmt: skip
    report = check_program(reference, Collectives(dist.group.WORLD), "eager")
    assert any(tensor.name.startswith("grad inner.") for tensor in report.tensors)
    return report.failures(limit=2.5)


def _everything() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        found = {
            "forms": _wrong_forms(),
            "ran": {saves: _num_all_reduces(saves) for saves in (None, *SAVES)},
            "block": {saves: _wrong_of_block(saves) for saves in SAVES},
            "waited_outside": _started_under_a_mode(),
            "negated": _negated(),
        }
        patch.setattr(c10d, "is_functional", c10d.is_tracing)
        return found | {"in_place": _wrong_or_refused_in_place()}


def _wrong_or_refused_in_place() -> dict[str, bool]:
    """Negative control: with the in-place ops the kept result of a collective is a buffer without data."""
    found = {}
    for name in ("all_reduce sum I", "all_gather R dim 0", "all_to_all dim 0"):
        found[name] = torch.equal(_gradient(name, "c10d"), _gradient(name, None))
    return found


def _started_under_a_mode() -> list[float]:
    from tpcompile.collectives import asynchronous as later

    x = torch.full((2,), dist.get_rank() + 1.0, requires_grad=True)
    with _Ran():
        pending = later.all_reduce_start(x, group=dist.group.WORLD, dst="R")
    y = pending.wait()
    y.sum().backward()
    assert x.grad is not None
    return [*y.tolist(), *x.grad.tolist()]


def _negated() -> list[float]:
    x = torch.full((2,), 1j * (dist.get_rank() + 1)).conj().imag  # lazily negated
    assert x.is_neg()
    with _Ran():
        return tp.all_reduce(x, group=dist.group.WORLD).tolist()


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_everything)


def test_every_collective_keeps_its_gradient_whichever_ops_the_policy_saves(ranks: list[dict[str, Any]]) -> None:
    assert [r["forms"] for r in ranks] == [[], []]


def test_with_the_in_place_ops_the_gradient_is_wrong(ranks: list[dict[str, Any]]) -> None:
    for r in ranks:
        assert not any(r["in_place"].values()), r["in_place"]


def test_a_policy_that_saves_the_functional_ops_runs_each_collective_once(ranks: list[dict[str, Any]]) -> None:
    for r in ranks:
        assert r["ran"] == {None: 1, "c10d": 2, "_c10d_functional": 1, "everything": 1}


def test_a_checkpointed_block_agrees_with_one_device(ranks: list[dict[str, Any]]) -> None:
    assert [r["block"] for r in ranks] == [{key: {} for key in SAVES}] * 2


def test_a_collective_started_under_a_mode_may_be_waited_for_outside(ranks: list[dict[str, Any]]) -> None:
    assert [r["waited_outside"] for r in ranks] == [[3.0, 3.0, 2.0, 2.0]] * 2


def test_a_lazy_negation_is_resolved_under_a_mode(ranks: list[dict[str, Any]]) -> None:
    assert [r["negated"] for r in ranks] == [[-3.0, -3.0]] * 2
