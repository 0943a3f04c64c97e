"""KVCache: decoding token by token on two gloo ranks is the full causal pass, in one graph that no step recompiles."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graphs import GraphCapture
from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import ConfigError
from tpcompile.nn.cache import KVCache
from tpcompile.nn.linear import PackedColumnLinear, RowParallelLinear
from tpcompile.testing import run_on_ranks

F64 = {"dtype": torch.float64}
BATCH, TOKENS, MAX_LEN, HEADS, HEAD_DIM, DIM = 2, 10, 12, 4, 4, 6
STEPS = 8  # after a prompt of two tokens
NUMBERS = 3  # steps that compile again, each of them


class Decoder(nn.Module):
    """One attention layer, heads sharded, with a cache."""

    def __init__(self, comm: Any) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.wqkv = PackedColumnLinear(DIM, (width, width, width), bias=False, comm=comm, **F64)
        self.wo = RowParallelLinear(width, DIM, bias=False, comm=comm, **F64)
        self.cache = KVCache(BATCH, MAX_LEN, HEADS // comm.size, HEAD_DIM, **F64)
        for seed, linear in enumerate((self.wqkv, self.wo)):
            shape = linear.layout.full_shape(linear.weight.shape)
            full = torch.randn(shape, generator=torch.Generator().manual_seed(seed), **F64)
            with torch.no_grad():
                linear.weight.copy_(linear.layout.take(full, rank=comm.rank, size=comm.size))

    def forward(self, x_BSD: Tensor, positions_S: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in self.wqkv(x_BSD))
        k, v = self.cache.update(k, v, positions_S)
        return self._attend(q, k, v, attn_mask=self.cache.mask(positions_S))

    def full_pass(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in self.wqkv(x_BSD))
        return self._attend(q, k, v, is_causal=True)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        heads = (t.transpose(1, 2) for t in (q, k, v))
        return self.wo(F.scaled_dot_product_attention(*heads, **mask).transpose(1, 2).flatten(2))


class NumberPosition(Decoder):
    """Takes the position as a Python number."""

    def forward(self, x_BSD: Tensor, position: Any) -> Tensor:
        return super().forward(x_BSD, torch.tensor([position]))


def _tokens() -> Tensor:
    return torch.randn(BATCH, TOKENS, DIM, generator=torch.Generator().manual_seed(9), **F64)


@torch.no_grad()
def _decode(decoder: Decoder, backend: Any, *, as_number: bool = False) -> tuple[Tensor, int, int]:
    """(outputs of prompt and steps, graphs of the steps, recompiles after the first step)."""
    torch._dynamo.reset()
    x = _tokens()
    outputs = [decoder(x[:, :2], torch.arange(2))] if not as_number else []
    run = torch.compile(decoder, backend=backend, fullgraph=True, dynamic=False) if backend else decoder
    stats = torch._dynamo.utils.counters["stats"]
    stats.clear()
    first = 0
    for position in range(2, 2 + (NUMBERS if as_number else STEPS)):
        place = position if as_number else torch.tensor([position])
        outputs.append(run(x[:, position : position + 1], place))
        first = first or stats["unique_graphs"]
    return torch.cat(outputs, 1), stats["unique_graphs"], stats["unique_graphs"] - first


def _worker() -> dict[str, Any]:
    single = Decoder(Collectives(None))
    with torch.no_grad():
        expected = single.full_pass(_tokens())
    comm = Collectives(dist.group.WORLD)
    found: dict[str, Any] = {"errors": {}, "graphs": {}}
    decoder = Decoder(comm)
    capture = GraphCapture()
    for name, backend in {"eager": None, "aot_eager": capture, "inductor": "inductor"}.items():
        decoder.cache.reset()
        y, *found["graphs"][name] = _decode(decoder, backend)
        found["errors"][name] = (y - expected).abs().max().item()
    found["texts"] = capture.texts
    found["number"] = _decode(NumberPosition(comm), "eager", as_number=True)[1:]
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_worker, timeout_s=180)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_decoding_token_by_token_equals_the_full_causal_pass(ranks: list[dict[str, Any]], backend: str) -> None:
    assert max(found["errors"][backend] for found in ranks) < 1e-12


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_eight_steps_are_one_graph_and_no_recompile(ranks: list[dict[str, Any]], backend: str) -> None:
    assert [found["graphs"][backend] for found in ranks] == [[1, 0], [1, 0]]


def test_position_as_a_python_number_compiles_again_at_every_step(ranks: list[dict[str, Any]]) -> None:
    assert [found["number"] for found in ranks] == [(NUMBERS, NUMBERS - 1)] * 2


def test_graphs_of_the_ranks_are_one_text(ranks: list[dict[str, Any]]) -> None:
    assert [kind for kind, _ in ranks[0]["texts"]] == ["dynamo", "forward"]
    assert ranks[0]["texts"] == ranks[1]["texts"]


def _cache(**change: Any) -> KVCache:
    return KVCache(**{"batch": 1, "max_len": 4, "num_heads": 2, "head_dim": 3} | change)


def test_update_writes_the_named_places_of_the_same_buffers() -> None:
    cache, k = _cache(), torch.ones(1, 2, 2, 3)
    keys, values = cache.update(k, 2 * k, torch.tensor([3, 1]))
    assert keys is cache.k_BTgE and values is cache.v_BTgE
    assert keys[0, :, 0, 0].tolist() == [0, 1, 0, 1] and values[0, :, 1, 2].tolist() == [0, 2, 0, 2]


def test_mask_shows_a_query_its_own_place_and_those_before() -> None:
    assert _cache().mask(torch.tensor([0, 2])).tolist() == [[True, False, False, False], [True, True, True, False]]


def test_reset_forgets_everything_in_place() -> None:
    cache, k = _cache(), torch.ones(1, 1, 2, 3)
    keys, _ = cache.update(k, k, torch.tensor([0]))
    assert keys.any()
    cache.reset()
    assert cache.k_BTgE is keys and not keys.any() and not cache.v_BTgE.any()


def test_buffers_are_not_saved() -> None:
    assert not _cache().state_dict() and len(list(_cache().buffers())) == 2


def test_more_tokens_than_places_are_refused_where_the_host_knows() -> None:
    cache, k = _cache(), torch.ones(1, 5, 2, 3)
    with pytest.raises(ConfigError, match=r"5 tokens .* 4; .*max_len .*5"):
        cache.update(k, k, torch.arange(5))
    with pytest.raises(ConfigError, match="5 tokens"):
        cache.check_room(5)
    cache.check_room(4)


def test_position_beyond_the_cache_raises_on_cpu() -> None:
    k = torch.ones(1, 1, 2, 3)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        _cache().update(k, k, torch.tensor([4]))


@pytest.mark.parametrize(
    ("shape", "positions", "dtype"),
    [
        ((2, 1, 2, 3), torch.tensor([0]), torch.float32),
        ((1, 1, 4, 3), torch.tensor([0]), torch.float32),
        ((1, 2, 2, 3), torch.tensor([0]), torch.float32),
        ((1, 1, 2, 3), torch.tensor([0]), torch.float64),
        ((1, 1, 2, 3), torch.tensor([0], dtype=torch.int32), torch.float32),
        ((1, 1, 2, 3), torch.tensor(0), torch.float32),
    ],
    ids=["batch", "heads of all ranks", "tokens", "dtype", "int32 positions", "no dim"],
)
def test_keys_and_positions_that_do_not_fit_are_refused(
    shape: tuple[int, ...], positions: Tensor, dtype: torch.dtype
) -> None:
    x, good = torch.ones(shape, dtype=dtype), torch.ones(1, 1, 2, 3)
    fits = positions.dim() == 1 and positions.dtype == torch.int64
    refused = f"{dtype} {shape}, " if fits else f"{positions.dtype} {tuple(positions.shape)}; "
    with pytest.raises(ConfigError, match=re.escape(refused)):
        _cache().update(x, x, positions)
    with pytest.raises(ConfigError, match=re.escape(refused)):
        _cache().update(good, x, positions)


def test_gradient_through_the_cache_is_refused_and_inference_is_not() -> None:
    k = torch.ones(1, 1, 2, 3, requires_grad=True)
    with pytest.raises(ConfigError, match="no_grad"):
        _cache().update(k, k, torch.tensor([0]))
    cache = _cache()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert cache.update(k, k, torch.tensor([0]))[0][0, 0].eq(1).all()


def test_empty_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="is empty"):
        _cache(num_heads=0)
