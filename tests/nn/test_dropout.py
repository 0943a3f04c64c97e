"""Dropout masks: statistics in one process at several tp sizes, equality of eager, compiled and two gloo ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.graphs import GraphCapture
from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import ConfigError
from tpcompile.nn.dropout import Dropout, global_index, keep_mask, seed_ranks
from tpcompile.testing import run_on_ranks

ALONE = Collectives(None)
SHAPE = (4, 8, 12)
P = 0.3
F32, BF16 = torch.float32, torch.bfloat16
# (backend, sharded dim, dtype); one compile by Inductor, in the dtype where its rounding could differ from eager's.
CASES = [(None, None, F32), (None, 0, F32), (None, 2, F32), ("aot_eager", None, F32), ("captured", 2, F32)]
CASES += [("inductor", 1, BF16)]


class Place(Collectives):
    """Rank `rank` of `size` without a group: masks need no communication."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size

    def rank_index(self, device: torch.device) -> Tensor:
        return torch.tensor([self.rank], device=device)


class NumberRank(Collectives):
    """Lets compiled code read the rank as a Python number."""

    def rank_index(self, device: torch.device) -> Tensor:
        return torch.full((1,), self.rank, device=device)


def _seed(number: int = 7) -> Tensor:
    return torch.tensor([number])


def _drop(x: Tensor, comm: Any = ALONE, *, seed: int = 7, site: int = 0, dim: int | None = None) -> Tensor:
    return Dropout(P, site=site, comm=comm, sharded_dim=dim)(x, _seed(seed))


def _mask(count: int, *, seed: int = 7, site: int = 0, p: float = P, start: int = 0) -> Tensor:
    return keep_mask(torch.arange(start, start + count), _seed(seed), site=site, p=p)


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "dim"), list(itertools.product((2, 4), (0, 1, 2, -1))))
def test_shards_of_the_mask_are_the_single_device_mask(tp: int, dim: int) -> None:
    full = _drop(torch.ones(SHAPE))
    shards = [_drop(x, Place(rank, tp), dim=dim) for rank, x in enumerate(torch.ones(SHAPE).chunk(tp, dim))]
    assert torch.equal(torch.cat(shards, dim), full)


def test_replicated_activations_get_the_single_device_mask_on_every_rank() -> None:
    assert all(torch.equal(_drop(torch.ones(SHAPE), Place(rank, 4)), _drop(torch.ones(SHAPE))) for rank in range(4))


def test_padded_shares_drop_what_the_single_device_drops() -> None:
    full = _drop(torch.ones(4, 8, 10))
    for rank, real in enumerate((3, 3, 3, 1)):
        drop = Dropout(P, site=0, comm=Place(rank, 4), sharded_dim=-1, full_size=10)
        assert torch.equal(drop(torch.ones(4, 8, 3), _seed())[..., :real], full[..., 3 * rank : 3 * rank + real])


def test_dropout_without_a_seed_is_refused_when_training() -> None:
    drop = Dropout(P, site=0, comm=ALONE)
    with pytest.raises(ConfigError, match=r"p=0\.3 .*seed"):
        drop(torch.ones(4), None)
    assert torch.equal(drop.eval()(torch.ones(4), None), torch.ones(4))


def test_tokens_sharded_token_major_drop_what_the_batch_would() -> None:
    full = _drop(torch.ones(SHAPE)).flatten(0, 1)
    assert torch.equal(_drop(torch.ones(16, 12), Place(1, 2), dim=0), full[16:])


def test_index_without_the_rank_gives_every_rank_the_first_ranks_mask() -> None:
    shards = [_drop(torch.ones(4, 8, 6), Place(0, 2), dim=2) for _ in range(2)]
    assert not torch.equal(torch.cat(shards, 2), _drop(torch.ones(SHAPE)))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_share_of_kept_elements_is_one_minus_p(p: float) -> None:
    count = 1 << 20
    deviation = (p * (1 - p) / count) ** 0.5
    for seed in (0, 1, -1, 2**62):
        assert abs(_mask(count, seed=seed, p=p).double().mean().item() - (1 - p)) < 5 * deviation


def _chi_square(a: Tensor, b: Tensor) -> float:
    """Statistic of independence of two masks, one degree of freedom: below 25 except once in two million."""
    counts = torch.bincount(a.int() * 2 + b.int(), minlength=4).double().view(2, 2)
    expected = counts.sum(1, keepdim=True) * counts.sum(0, keepdim=True) / counts.sum()
    return ((counts - expected).square() / expected).sum().item()


def test_masks_of_seeds_sites_ranks_and_neighbours_are_uncorrelated() -> None:
    n = 1 << 18
    base = _mask(n)
    others = {
        "next seed": _mask(n, seed=8),
        "far seed": _mask(n, seed=7 + 2**32),
        "next site": _mask(n, site=1),
        "far site": _mask(n, site=2**31),
        "next rank": _mask(n, start=n),
        "beyond 32 bits": _mask(n, start=2**32),
        "site and seed swapped": _mask(n, seed=0, site=7),
    } | {f"neighbour {k}": _mask(n, start=k) for k in (1, 2, 3, 4, 64, 128, 1024, 4096, 5120)}
    for name, other in others.items():
        assert _chi_square(base, other) < 25, name


def test_chi_square_goes_red_on_equal_and_on_slightly_dependent_masks() -> None:
    a, b = _mask(1 << 18), _mask(1 << 18, seed=8)
    dependent = torch.where(torch.arange(1 << 18) % 50 == 0, a, b)
    assert _chi_square(a, a) > 1e4 and _chi_square(a, dependent) > 25


def test_runs_of_sixteen_neighbours_are_uniform() -> None:
    """All 2**16 patterns of 16 neighbours at p = 1/2; chi-square with 65535 degrees, 6 standard deviations."""
    bits = _mask(1 << 22, p=0.5).view(-1, 16).int()
    counts = torch.bincount((bits * (1 << torch.arange(16))).sum(1), minlength=1 << 16).double()
    statistic = ((counts - counts.mean()).square() / counts.mean()).sum().item()
    assert abs(statistic - 65535) < 6 * (2 * 65535) ** 0.5


def test_masks_of_two_seeds_are_not_one_mask_with_its_places_permuted() -> None:
    """One round of hashing fails this: seeds a and b would give mask b at place i = mask a at place i ^ key."""
    a, b = _mask(1 << 12), _mask(1 << 12, seed=8)
    places = torch.arange(1 << 12)
    agreement = torch.stack([(a[places ^ key] == b).double().mean() for key in range(1 << 12)])
    assert agreement.max() < 0.7, "independent masks agree at 0.7**2 + 0.3**2 = 0.58 of the places"


def test_expectation_is_preserved_and_gradient_is_the_scaled_mask() -> None:
    x = torch.ones(512, 512, dtype=torch.float64, requires_grad=True)
    y = _drop(x)
    assert abs(y.mean().item() - 1) < 5 * (P / (1 - P) / x.numel()) ** 0.5
    y.sum().backward()
    keep = keep_mask(torch.arange(x.numel()), _seed(), site=0, p=P).view(512, 512)
    assert torch.equal(x.grad, keep.double() * (1 / (1 - P)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_dropped_infinities_are_zero(dtype: torch.dtype) -> None:
    y = _drop(torch.full((64,), float("inf"), dtype=dtype))
    assert y.dtype == dtype and set(y.tolist()) == {0.0, float("inf")}


def test_eval_mode_and_p_zero_return_the_input_itself() -> None:
    x = torch.ones(4)
    assert Dropout(P, site=0, comm=ALONE).eval()(x, _seed()) is x
    assert Dropout(0.0, site=0, comm=ALONE)(x, _seed()) is x
    assert Dropout(P, site=0, comm=ALONE)(x, _seed()) is not x


def _gradients_recomputed(drop: Any) -> tuple[Tensor, Tensor]:
    """Gradient of drop(x) * drop(x).detach()-like work with and without activation checkpointing of it."""
    grads = []
    for recompute in (False, True):
        x = torch.linspace(1, 2, 256).requires_grad_()
        torch.manual_seed(0)
        run = (lambda x: checkpoint(drop, x, use_reentrant=False, preserve_rng_state=False)) if recompute else drop
        run(x).sum().backward()
        grads.append(x.grad)
    return grads[0], grads[1]


def test_activation_checkpointing_recomputes_the_same_mask() -> None:
    plain, recomputed = _gradients_recomputed(lambda x: _drop(x.square()).sin())
    assert torch.equal(plain, recomputed)


def test_checkpointed_torch_dropout_without_its_random_state_recomputes_a_different_mask() -> None:
    plain, recomputed = _gradients_recomputed(lambda x: F.dropout(x.square(), P).sin())
    assert not torch.equal(plain, recomputed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p": 1.0, "site": 0}, r"p=1.0 is outside \[0, 1\)"),
        ({"p": -0.1, "site": 0}, "outside"),
        ({"p": P, "site": -1}, "site=-1"),
        ({"p": P, "site": 2**32}, "number the dropouts"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dropout(comm=ALONE, **arguments)


@pytest.mark.parametrize("seed", [torch.tensor(1), torch.tensor([1, 2]), torch.tensor([1.0])])
def test_seed_of_a_different_shape_or_dtype_is_refused(seed: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"seed is .*int64 .*\(1,\)"):
        Dropout(P, site=0, comm=ALONE)(torch.ones(4), seed)


def test_sharded_dim_that_the_tensor_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sharded_dim=2 .*2 dims"):
        global_index((4, 4), sharded_dim=2, comm=Place(0, 2), device=torch.device("cpu"))


# --- two ranks --------------------------------------------------------------------------------------------------------


def _through(comm: Any, backend: Any, dim: int | None, dtype: torch.dtype = F32) -> dict[str, Any]:
    """Outputs and input gradients for two seeds of one compiled dropout, and how often it compiled."""
    torch._dynamo.reset()
    frames = torch._dynamo.utils.counters["stats"]
    frames.clear()
    drop = Dropout(P, site=3, comm=comm, sharded_dim=dim)
    capture = GraphCapture()
    compiler = capture if backend == "captured" else backend
    run = torch.compile(drop, backend=compiler, fullgraph=True) if backend else drop
    x = _input(dtype) if dim is None else _input(dtype).chunk(comm.size, dim)[comm.rank]
    results = []
    for seed in (1, -(2**40)):
        leaf = x.clone().requires_grad_()
        y = run(leaf, _seed(seed))
        y.sum().backward()
        results += [y.detach(), leaf.grad]
    return {"results": results, "graphs": frames.get("unique_graphs", 0), "texts": capture.texts}


def _input(dtype: torch.dtype) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)).to(dtype)


def _torch_drops(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return F.dropout(torch.ones(64), P)


def _worker() -> dict[str, Any]:
    comm = Collectives(dist.group.WORLD)
    own_seed = seed_ranks(5, comm)
    drawn = torch.rand(64)
    again = seed_ranks(5, comm)
    same_numbers = torch.equal(drawn, torch.rand(64))
    runs = {case: _through(comm, *case) for case in CASES}
    return {
        "runs": runs,
        "one device": {dtype: _through(ALONE, None, None, dtype)["results"] for dtype in (F32, BF16)},
        "graphs": runs["captured", 2, F32]["texts"],
        "number_graphs": _through(NumberRank(comm.group), "captured", 2)["texts"],
        "torch, one seed": _torch_drops(0),
        "torch, own seed": _torch_drops(own_seed),
        "seeds": (own_seed, again, same_numbers, drawn),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_worker, timeout_s=180)


def test_two_ranks_drop_what_one_device_drops_in_every_backend(ranks: list[dict[str, Any]]) -> None:
    for case in CASES:
        backend, dim, dtype = case
        for index, expected in enumerate(ranks[0]["one device"][dtype]):
            parts = [found["runs"][case]["results"][index] for found in ranks]
            if dim is None:
                assert torch.equal(parts[0], expected) and torch.equal(parts[1], expected), backend
            else:
                assert torch.equal(torch.cat(parts, dim), expected), case


def test_a_new_seed_does_not_compile_again(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert {case[0]: run["graphs"] for case, run in found["runs"].items()} == {
            None: 0, "aot_eager": 1, "captured": 1, "inductor": 1,
        }  # fmt: skip


def test_graphs_of_the_ranks_are_one_text(ranks: list[dict[str, Any]]) -> None:
    assert [kind for kind, _ in ranks[0]["graphs"]] == ["dynamo", "forward", "backward"]
    assert ranks[0]["graphs"] == ranks[1]["graphs"]


def test_rank_as_a_python_number_is_caught_by_the_text_comparison(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["number_graphs"] != ranks[1]["number_graphs"]


def test_one_torch_seed_on_sharded_activations_drops_the_same_places_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    """Known TP bug 15, first half: halves that one device would never drop alike."""
    first, second = (found["torch, one seed"] for found in ranks)
    single = _torch_drops_of_both()
    assert torch.equal(first, second) and not torch.equal(torch.cat((first, second)), single)
    ours = [found["runs"][None, 2, F32]["results"][0] for found in ranks]
    assert not torch.equal(ours[0] == 0, ours[1] == 0)


def _torch_drops_of_both() -> Tensor:
    torch.manual_seed(0)
    return F.dropout(torch.ones(128), P)


def test_torch_seeds_of_their_own_on_replicated_activations_make_the_ranks_diverge(ranks: list[dict[str, Any]]) -> None:
    """Known TP bug 15, second half."""
    first, second = (found["torch, own seed"] for found in ranks)
    assert not torch.equal(first, second)
    ours = [found["runs"][None, None, F32]["results"][0] for found in ranks]
    assert torch.equal(*ours)


def test_seed_ranks_is_reproducible_and_differs_between_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        own, again, same_numbers, _ = found["seeds"]
        assert own == again and same_numbers
    assert ranks[0]["seeds"][0] != ranks[1]["seeds"][0]
    assert not torch.equal(ranks[0]["seeds"][3], ranks[1]["seeds"][3])
    assert [found["seeds"][0] for found in ranks] == [seed_ranks(5, Place(rank, 2)) for rank in range(2)]
