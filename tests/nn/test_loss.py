"""Vocabulary-parallel cross-entropy on 1, 2, 4 gloo ranks: F.cross_entropy of the full logits, and what breaks it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.graphs import GraphCapture
from tests.nn.declared import declared_cross_entropy
from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import ConfigError
from tpcompile.layout import Part
from tpcompile.nn.loss import vocab_parallel_cross_entropy
from tpcompile.testing import run_on_ranks

F64 = torch.float64
TOKENS, VOCABS = 7, (12, 5)  # 5 over 4 ranks: one rank of nothing but padding
FORMS = list(itertools.product(("mean", "sum", "none"), (0.0, 0.1), (-100, 1)))


class NumberRank(Collectives):
    """Lets compiled code read the rank as a Python number."""

    def rank_index(self, device: torch.device) -> Tensor:
        return torch.full((1,), self.rank, device=device)


class LocalSoftmax(Collectives):
    """Normalises over this rank's columns only."""

    def all_reduce(self, x: Tensor, dst: Any = "I") -> Tensor:
        return x


class WrongGradient(Collectives):
    """Sums the replicated gradient of the sums once per rank."""

    def all_reduce(self, x: Tensor, dst: Any = "I") -> Tensor:
        return super().all_reduce(x, "R")


def _logits(vocab: int, dtype: torch.dtype = F64) -> Tensor:
    """Columns of very different size: the softmax of a shard is far from that of all, and exp overflows unshifted."""
    noise = torch.randn(TOKENS, vocab, generator=torch.Generator().manual_seed(1), dtype=F64)
    return (noise * torch.linspace(1, 300, vocab, dtype=F64)).to(dtype)


def _targets(vocab: int) -> Tensor:
    """All kinds of columns, the last one, an ignored one, and index 1 twice."""
    return torch.tensor([0, vocab - 1, -100, 1, vocab // 2, 1, 2])


def _own_columns(full: Tensor, comm: Any) -> Tensor:
    """This rank's columns; the padding holds numbers that must not matter."""
    vocab = full.shape[1]
    part = Part(vocab, padded=True)
    start, count = part.rows(rank=comm.rank, tp=comm.size)
    return F.pad(full[:, start : start + count], (0, part.share(comm.size) - count), value=1e3)


def _loss(comm: Any, full: Tensor, targets: Tensor, *, backend: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Loss and its gradient on this rank's columns."""
    logits = _own_columns(full, comm).requires_grad_()

    def compute(logits: Tensor, targets: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, targets, comm=comm, vocab_size=full.shape[1], **options)

    if backend:
        torch._dynamo.reset()
        compute = torch.compile(compute, backend=backend, fullgraph=True)
    loss = compute(logits, targets)
    (loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


def _errors(comm: Any, vocab: int, *, backend: Any = None, **options: Any) -> dict[str, Any]:
    targets = _targets(vocab)
    if options.get("ignore_index", -100) != -100:
        targets = targets.masked_fill(targets == -100, 0)
    full = _logits(vocab).requires_grad_()
    loss, grad = _loss(comm, full.detach(), targets, backend=backend, **options)
    expected = F.cross_entropy(full, targets, **options)
    (expected * torch.linspace(1, 2, expected.numel(), dtype=F64).view(expected.shape)).sum().backward()
    assert full.grad is not None
    start, count = Part(vocab, padded=True).rows(rank=comm.rank, tp=comm.size)
    return {
        "loss": ((loss - expected).norm() / expected.norm()).item(),
        "grad": (grad[:, :count] - full.grad[:, start : start + count]).abs().max().item() if count else 0.0,
        "padding": grad[:, count:].abs().sum().item(),
        "grad ratio": (grad.norm() / full.grad[:, start : start + count].norm()).item() if count else 1.0,
        "value": loss,
    }


def _slope(comm: Any, vocab: int) -> tuple[float, float]:
    """(central difference, gradient times direction) of the loss along one direction of the full logits."""
    full, step = _logits(vocab) / 100, 1e-6
    direction = torch.randn(TOKENS, vocab, generator=torch.Generator().manual_seed(2), dtype=F64)
    options: dict[str, Any] = {"label_smoothing": 0.1}
    ahead, behind = (_loss(comm, full + s * direction, _targets(vocab), **options)[0] for s in (step, -step))
    _, grad = _loss(comm, full, _targets(vocab), **options)
    product = (grad * _own_columns(direction, comm)).sum()
    return ((ahead - behind) / (2 * step)).item(), comm.all_reduce(product.view(1)).item()


def _low_precision(comm: Any) -> tuple[torch.dtype, float]:
    """Error of the loss of bf16 logits against float64 arithmetic on the same numbers."""
    full = _logits(12, torch.bfloat16)
    loss, _ = _loss(comm, full, _targets(12))
    exact = F.cross_entropy(full.to(F64), _targets(12))
    return loss.dtype, abs(loss.item() / exact.item() - 1)


def _texts(comm: Any) -> list[tuple[str, str]]:
    capture = GraphCapture()
    _loss(comm, _logits(5), _targets(5), backend=capture, label_smoothing=0.1)
    return capture.texts


def _worker() -> dict[str, Any]:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {1: None, 2: halves[dist.get_rank() // 2], 4: dist.group.WORLD}
    found: dict[str, Any] = {"right": {}, "slope": {}}
    for (tp, group), vocab in itertools.product(groups.items(), VOCABS):
        comm = Collectives(group)
        for reduction, smoothing, ignored in FORMS:
            options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
            found["right"][tp, vocab, *options.values()] = _errors(comm, vocab, **options)
        found["slope"][tp, vocab] = _slope(comm, vocab)
    tp2, tp4 = Collectives(groups[2]), Collectives(groups[4])
    capture = GraphCapture()
    found["right"][4, 5, "aot"] = _errors(tp4, 5, label_smoothing=0.1, backend=capture)
    found["graphs"], found["collectives"] = {"right": capture.texts}, capture.collectives
    if dist.get_rank() < 2:  # One group is enough; four ranks compiling at once would only crowd the machine.
        found["right"][2, 5, "inductor"] = _errors(tp2, 5, label_smoothing=0.1, backend="inductor")
        found["graphs"]["number"] = _texts(NumberRank(tp2.group))
    found["bf16"] = _low_precision(tp4)
    found["local softmax"] = _errors(LocalSoftmax(tp2.group), 12)
    found["wrong gradient"] = _errors(WrongGradient(tp2.group), 12)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_worker, world_size=4, timeout_s=240)


def test_loss_and_gradient_equal_one_device_in_every_form_tp_size_and_backend(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(found["right"]) >= 3 * 2 * len(FORMS) + 1
        for case, errors in found["right"].items():
            assert max(errors["loss"], errors["grad"]) < 1e-12, (case, errors)
            assert errors["padding"] == 0, case
    assert (2, 5, "inductor") in ranks[0]["right"]


def test_all_ranks_hold_the_same_loss_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    for case, errors in ranks[0]["right"].items():
        others = [found["right"][case]["value"] for found in ranks if case in found["right"]]
        assert all(torch.equal(errors["value"], other) for other in others), case


def test_gradient_is_the_slope_of_the_loss(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for case, (difference, product) in found["slope"].items():
            assert difference == pytest.approx(product, rel=1e-6), case
            assert abs(product) > 1e-3, "a direction that moves the loss"


def test_statistics_of_bf16_logits_are_float32(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        dtype, error = found["bf16"]
        assert dtype == torch.float32
        assert error < 1e-6, "bf16 statistics would be off by about 1e-3"


def test_graphs_of_the_ranks_are_one_text(ranks: list[dict[str, Any]]) -> None:
    assert [kind for kind, _ in ranks[0]["graphs"]["right"]] == ["dynamo", "forward", "backward"]
    assert all(found["graphs"]["right"] == ranks[0]["graphs"]["right"] for found in ranks)


def test_rank_as_a_python_number_is_caught_by_the_text_comparison(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["graphs"]["number"] != ranks[1]["graphs"]["number"]


def test_collectives_are_the_declared_ones(ranks: list[dict[str, Any]]) -> None:
    declared = declared_cross_entropy(TOKENS, F64, label_smoothing=0.1).select(train=True)
    rows = [(c.phase, c.op, c.reduce_op, c.dtype, c.shape) for c in declared]
    assert [row[2] for row in rows] == ["max", "sum"]
    assert ranks[0]["collectives"] == rows


def test_softmax_over_the_local_shard_gives_a_wrong_loss(ranks: list[dict[str, Any]]) -> None:
    assert max(found["local softmax"]["loss"] for found in ranks) > 0.1


def test_summing_the_replicated_gradient_makes_it_tp_times_too_large(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["wrong gradient"]["loss"] < 1e-12
        assert found["wrong gradient"]["grad ratio"] == pytest.approx(2.0)


def test_gradcheck_passes_on_one_device() -> None:
    def compute(logits: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits, _targets(5), comm=Collectives(None), vocab_size=5, label_smoothing=0.2, reduction="none"
        )

    assert torch.autograd.gradcheck(compute, (_logits(5).div(100).requires_grad_(),))


def test_mean_with_every_target_ignored_is_nan_as_in_torch() -> None:
    logits, targets = _logits(5), torch.full((TOKENS,), -100)
    ours = vocab_parallel_cross_entropy(logits, targets, comm=Collectives(None), vocab_size=5)
    assert ours.isnan() and F.cross_entropy(logits, targets).isnan()


@pytest.mark.parametrize("bad", [-1, 5, 7])
def test_target_outside_the_vocabulary_makes_its_loss_nan_and_no_other(bad: int) -> None:
    targets = _targets(5)
    targets[3] = bad
    loss = vocab_parallel_cross_entropy(_logits(5), targets, comm=Collectives(None), vocab_size=5, reduction="none")
    assert loss.isnan().tolist() == [i == 3 for i in range(TOKENS)]


class _Two(Collectives):
    """Size 2 without a group."""

    def __init__(self) -> None:
        super().__init__(None)
        self.size = 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits_Nv": torch.zeros(2, 3, 3)}, r"pass logits \[N, V / tp\] and targets \[N\]"),
        ({"targets_N": torch.zeros(3, dtype=torch.int64)}, r"logits \(2, 3\), targets \(3,\)"),
        ({"targets_N": torch.zeros(2)}, "pass floats and int64"),
        ({"vocab_size": 7}, "3 columns on this rank, but vocab_size=7 over tp=2 makes 4"),
        ({"reduction": "max"}, "choose from mean, sum, none"),
        ({"label_smoothing": 1.5}, r"outside \[0, 1\]"),
    ],
    ids=["dims", "tokens", "dtype", "columns", "reduction", "smoothing"],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "logits_Nv": torch.zeros(2, 3), "targets_N": torch.zeros(2, dtype=torch.int64), "vocab_size": 5,
    }  # fmt: skip
    arguments |= change
    logits, targets = arguments.pop("logits_Nv"), arguments.pop("targets_N")
    with pytest.raises(ConfigError, match=message):
        vocab_parallel_cross_entropy(logits, targets, comm=_Two(), **arguments)
