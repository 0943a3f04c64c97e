"""Both vocabulary-parallel ends on 1, 2 and 4 gloo ranks: exact against one device, visibly wrong when built wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graphs import GraphCapture
from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import ConfigError
from tpcompile.nn.embedding import ParallelEmbedding, ParallelLMHead
from tpcompile.nn.sharding import specs_of
from tpcompile.testing import run_on_ranks

F64 = {"dtype": torch.float64}
DIM, SEQ, BATCH = 6, 8, 2
TPS = (1, 2, 4)
VOCABS = (12, 10, 5)  # over 4 ranks: no padding, one rank half padded, one rank of nothing but padding


class NumberRank(Collectives):
    """Lets compiled code read the rank as a Python number."""

    def rank_index(self, device: torch.device) -> Tensor:
        return torch.full((1,), self.rank, device=device)


class WrongGradient(Collectives):
    """Sums the replicated gradient of the output once per rank."""

    def all_reduce(self, x: Tensor, dst: Any = "I") -> Tensor:
        return super().all_reduce(x, "R")


class Unmasked(ParallelEmbedding):
    """Adds a row of its own shard for every id that a different rank owns."""

    def _own_rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids % self.num_local, self.weight)


class Ends(nn.Module):
    """Embedding, a nonlinearity, head."""

    def __init__(self, comm: Any, vocab: int, *, tied: bool = False, sp: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.embedding = ParallelEmbedding(vocab, DIM, comm=comm, pad=True, sequence_parallel=sp, **F64)
        self.head = ParallelLMHead(DIM, vocab, comm=comm, pad=True, bias=bias, sequence_parallel=sp, **F64)
        if tied:
            self.head.tie(self.embedding)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        return x, self.head(x.sin())


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **F64)


def _ids(vocab: int) -> Tensor:
    """Every id at least once, repeated ones, sequence first."""
    return torch.arange(SEQ * BATCH).mul(7).remainder(vocab).view(SEQ, BATCH)


def _load(module: nn.Module, comm: Any, vocab: int) -> dict[str, Tensor]:
    """Fill with this rank's slices, and the padding with numbers that must not matter."""
    specs, full = specs_of(module), {}
    for seed, (name, parameter) in enumerate(module.named_parameters()):
        full[name] = _draw(*specs[name].full_shape(parameter.shape), seed=seed).requires_grad_()
        start, count = specs[name].packed[0].rows(rank=comm.rank, tp=comm.size)
        with torch.no_grad():
            parameter.fill_(99.0)
            parameter[:count] = full[name][start : start + count]
    return full


def _relative(value: Tensor | None, reference: Tensor | None) -> float:
    assert value is not None and reference is not None
    return ((value - reference).norm() / reference.norm().clamp(min=1e-30)).item()


def _errors(comm: Any, vocab: int, *, tied: bool = False, sp: bool = False, backend: Any = None) -> dict[str, Any]:
    """Against F.embedding and F.linear of the full tables."""
    torch._dynamo.reset()
    module = Ends(comm, vocab, tied=tied, sp=sp)
    full = _load(module, comm, vocab)
    ids, probe = _ids(vocab), _draw(SEQ, BATCH, vocab, seed=9)
    x, logits = (torch.compile(module, backend=backend, fullgraph=True) if backend else module)(ids)
    gathered = module.head.gather(logits)
    (gathered * probe).sum().backward()

    table = full["embedding.weight"]
    expected_x = F.embedding(ids, table)
    expected = F.linear(expected_x.sin(), table if tied else full["head.weight"], full["head.bias"])
    (expected * probe).sum().backward()
    if sp:
        expected_x = expected_x.chunk(comm.size)[comm.rank]
    grads = []
    for name, parameter in module.named_parameters():
        start, count = specs_of(module)[name].packed[0].rows(rank=comm.rank, tp=comm.size)
        mine, whole = parameter.grad, full[name].grad
        assert mine is not None and whole is not None, f"{name} got no gradient"
        assert not mine[count:].any(), "padding rows get no gradient"
        grads.append(_relative(mine[:count], whole[start : start + count]))
    return {
        "embedding": torch.equal(x, expected_x),
        "logits": _relative(gathered, expected),
        "grads": max(grads),
        "padding": logits[..., module.head.layout.packed[0].rows(rank=comm.rank, tp=comm.size)[1] :].detach(),
    }


def _table_gradient(comm: Any, vocab: int, kind: type[ParallelEmbedding] = ParallelEmbedding) -> tuple[Any, ...]:
    """(output, table gradient) bit equal to F.embedding's; and the ratio of the gradients' norms."""
    module = kind(vocab, DIM, comm=comm, pad=True, **F64)
    table = _load(module, comm, vocab)["weight"]
    x, expected = module(_ids(vocab)), F.embedding(_ids(vocab), table)
    for y in (x, expected):
        (y * _draw(SEQ, BATCH, DIM, seed=3)).sum().backward()
    start, count = module.layout.packed[0].rows(rank=comm.rank, tp=comm.size)
    assert module.weight.grad is not None and table.grad is not None
    own, reference = module.weight.grad[:count], table.grad[start : start + count]
    return (
        torch.equal(x, expected),
        torch.equal(own, reference),
        own.norm().item() / max(reference.norm().item(), 1e-30),
    )


def _captured(comm: Any, *, sp: bool = False) -> GraphCapture:
    torch._dynamo.reset()
    module, capture = Ends(comm, 5, sp=sp, bias=False), GraphCapture()
    _load(module, comm, 5)
    x, logits = torch.compile(module, backend=capture, fullgraph=True)(_ids(5))
    (x.sum() + logits[..., :1].sum()).backward()
    return capture


def _half_precision_is_exact(comm: Any) -> bool:
    module = ParallelEmbedding(12, DIM, comm=comm, dtype=torch.bfloat16)
    table = _draw(12, DIM).to(torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(module.layout.take(table, rank=comm.rank, size=comm.size))
    return torch.equal(module(_ids(12).int()), F.embedding(_ids(12), table))


def _worker() -> dict[str, Any]:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {1: None, 2: halves[dist.get_rank() // 2], 4: dist.group.WORLD}
    found: dict[str, Any] = {"ends": {}, "table": {}}
    for tp, group in groups.items():
        comm = Collectives(group)
        for vocab in VOCABS:
            found["table"][tp, vocab] = _table_gradient(comm, vocab)
            found["ends"][tp, vocab, "eager"] = _errors(comm, vocab)
        found["ends"][tp, 5, "tied"] = _errors(comm, 5, tied=True)
        found["ends"][tp, 5, "sequence parallel"] = _errors(comm, 5, sp=True)
    right = GraphCapture()
    found["ends"][4, 5, "aot"] = _errors(Collectives(groups[4]), 5, backend=right)
    found["bf16"] = _half_precision_is_exact(Collectives(groups[4]))
    tp2 = Collectives(groups[2])
    if dist.get_rank() < 2:  # One group is enough; four ranks compiling at once would only crowd the machine.
        found["ends"][2, 5, "inductor"] = _errors(tp2, 5, sp=True, backend="inductor")
        captures = {"right": right, "sp": _captured(tp2, sp=True), "number": _captured(NumberRank(tp2.group))}
        found["graphs"] = {name: capture.texts for name, capture in captures.items()}
        found["collectives"] = {name: capture.collectives for name, capture in captures.items()}
    found["wrong gradient"] = _table_gradient(WrongGradient(groups[2]), 12)
    found["unmasked"] = _table_gradient(tp2, 12, Unmasked)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_worker, world_size=4, timeout_s=240)


def test_embedding_and_its_table_gradient_equal_one_device_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert set(found["table"]) == {(tp, vocab) for tp in TPS for vocab in VOCABS}
        assert all(value[:2] == (True, True) for value in found["table"].values()), found["table"]
        assert found["bf16"]


def test_ends_equal_one_device_at_every_tp_size_form_and_backend(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for case, errors in found["ends"].items():
            assert errors["embedding"], case
            assert max(errors["logits"], errors["grads"]) < 1e-12, (case, errors)
    assert (2, 5, "inductor") in ranks[0]["ends"]


def test_padding_columns_are_minus_infinity_and_only_they(ranks: list[dict[str, Any]]) -> None:
    widths = [found["ends"][4, 5, "eager"]["padding"].shape[-1] for found in ranks]
    assert widths == [0, 0, 1, 2]
    for found in ranks:
        assert all((errors["padding"] == float("-inf")).all() for errors in found["ends"].values())


@pytest.mark.parametrize("form", ["right", "sp"])
def test_graphs_of_the_ranks_are_one_text(ranks: list[dict[str, Any]], form: str) -> None:
    texts = ranks[0]["graphs"][form]
    assert [kind for kind, _ in texts] == ["dynamo", "forward", "backward"]
    assert texts == ranks[1]["graphs"][form]


def test_rank_as_a_python_number_is_caught_by_the_text_comparison(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["graphs"]["number"] != ranks[1]["graphs"]["number"]


@pytest.mark.parametrize("form", ["right", "sp"])
def test_collectives_are_the_declared_ones(ranks: list[dict[str, Any]], form: str) -> None:
    module = Ends(_Two(), 5, sp=form == "sp", bias=False)
    x_shape = (SEQ, BATCH, DIM)
    declared = module.embedding.declared((SEQ, BATCH)).then(module.head.declared(x_shape, torch.float64))
    ops = [(c.phase, c.op) for c in declared.select(train=True)]
    found = ranks[0]["collectives"][form]
    assert [row[:2] for row in found] == ops
    if form == "right":
        assert [row[4] for row in found] == [c.shape for c in declared.select(train=True)]


def test_summing_the_replicated_gradient_makes_it_tp_times_too_large(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        equal, same_gradient, ratio = found["wrong gradient"]
        assert equal and not same_gradient
        assert ratio == pytest.approx(2.0)


def test_lookup_without_the_mask_is_visibly_wrong(ranks: list[dict[str, Any]]) -> None:
    assert not any(found["unmasked"][0] for found in ranks)


class _Two(Collectives):
    """Size 2 without a group."""

    def __init__(self) -> None:
        super().__init__(None)
        self.size = 2


@pytest.mark.parametrize("bad", [-1, 5, 6])
def test_id_outside_the_vocabulary_gives_a_row_of_nan_and_no_gradient(bad: int) -> None:
    embedding = ParallelEmbedding(5, DIM, comm=Collectives(None))
    nn.init.ones_(embedding.weight)
    y = embedding(torch.tensor([1, bad]))
    assert y[0].isfinite().all() and y[1].isnan().all()
    y.sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.sum() == DIM, "the gradient of the one good id only"


@pytest.mark.parametrize("ids", [torch.zeros(2), torch.tensor(3)], ids=["float", "no dim"])
def test_ids_that_cannot_be_looked_up_are_refused(ids: Tensor) -> None:
    with pytest.raises(ConfigError, match="pass int64 or int32"):
        ParallelEmbedding(5, DIM, comm=Collectives(None))(ids)


@pytest.mark.parametrize(
    "make", [lambda: ParallelEmbedding(7, 4, comm=_Two()), lambda: ParallelLMHead(4, 7, comm=_Two())]
)
def test_vocabulary_that_tp_does_not_divide_is_refused_unless_padded(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"=7 .*tp=2; .*\[1, 7\]"):
        make()


def test_tied_weight_is_one_parameter_declared_once() -> None:
    ends = Ends(Collectives(None), 5, tied=True)
    assert ends.head.weight is ends.embedding.weight
    assert set(specs_of(ends)) == {"embedding.weight", "head.bias"}


def test_tying_tables_of_different_sizes_is_refused() -> None:
    head = ParallelLMHead(DIM, 6, comm=Collectives(None))
    with pytest.raises(ConfigError, match="cannot tie"):
        head.tie(ParallelEmbedding(5, DIM, comm=Collectives(None)))
