"""Fingerprints are equal exactly when dtype, shape and every bit are; one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tpcompile.errors import ConfigError
from tpcompile.evidence.records.bounds import typed
from tpcompile.preflight import fingerprint as module
from tpcompile.preflight.fingerprint import fingerprint, mix128, raw_bytes
from tpcompile.preflight.locate import Question, answer_elements, locate, located

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int8, torch.int64,
          torch.bool, torch.float8_e4m3fn]  # fmt: skip


def mixed(tensor: Tensor) -> str:
    """The method for devices, on the CPU."""
    return mix128(raw_bytes(tensor))


METHODS: list[Callable[[Tensor], str]] = [fingerprint, mixed]


def bits_of(dtype: torch.dtype, shape: tuple[int, ...] = (5, 7)) -> Tensor:
    """A tensor of any dtype with bits all over."""
    count = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_of_any_dtype_changes_it_and_a_copy_does_not(
    method: Callable[[Tensor], str], dtype: torch.dtype
) -> None:
    x = bits_of(dtype)
    y = x.clone()
    assert method(x) == method(y)
    y.view(-1)[-1:].view(torch.uint8)[-1] ^= 1
    assert method(x) != method(y)


@pytest.mark.parametrize("method", METHODS)
def test_signed_zeros_and_payloads_of_nan_count(method: Callable[[Tensor], str]) -> None:
    assert method(torch.tensor([0.0])) != method(torch.tensor([-0.0]))
    nans = [torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001)]
    assert method(nans[0]) != method(nans[1])


@pytest.mark.parametrize("method", METHODS)
def test_layout_in_memory_does_not_count_order_does(method: Callable[[Tensor], str]) -> None:
    x = torch.arange(12.0).view(3, 4)
    assert method(x) == method(x.t().contiguous().t()) == method(torch.cat((x, x))[3:])
    assert method(x) != method(x.flip(0)) and method(x) != method(x.roll(2, 1))
    assert method(torch.ones(1).expand(6)) == method(torch.ones(6))


def test_shape_and_dtype_count() -> None:
    x = torch.zeros(6)
    assert len({fingerprint(x), fingerprint(x.view(2, 3)), fingerprint(x.int()), fingerprint(x[:5])}) == 4


@pytest.mark.parametrize("method", METHODS)
def test_lengths_count_even_when_all_is_zero(method: Callable[[Tensor], str]) -> None:
    prints = {method(torch.zeros(n, dtype=torch.uint8)) for n in range(20)}
    assert len(prints) == 20


def test_conjugated_views_are_read_as_what_they_mean() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    assert fingerprint(x.conj()) == fingerprint(x.conj().resolve_conj()) != fingerprint(x)


def test_a_tensor_without_data_says_so_and_one_without_raw_bytes_is_refused() -> None:
    assert fingerprint(torch.empty(3, device="meta")).startswith("float32[3] meta")
    with pytest.raises(ConfigError, match="sparse"):
        fingerprint(torch.eye(3).to_sparse())


def test_the_mix_does_not_depend_on_how_the_bytes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = bits_of(torch.uint8, (1003,))
    whole = mix128(raw)
    monkeypatch.setattr(module, "_CHUNK_WORDS", 16)
    assert mix128(raw) == whole
    assert mix128(torch.cat((raw[:1], raw))[1:]) == whole  # a view that is not aligned to words


def test_the_mix_has_no_collision_among_neighbours() -> None:
    base = torch.zeros(64, dtype=torch.uint8)
    prints = {mix128(base)}
    for position in range(64):
        for bit in range(8):
            changed = base.clone()
            changed[position] = 1 << bit
            prints.add(mix128(changed))
    assert len(prints) == 513
    lanes = list(zip(*((text[:16], text[16:32]) for text in prints), strict=True))
    assert len(set(lanes[0])) == len(set(lanes[1])) == 513


def test_the_mix_is_the_one_of_splitmix64() -> None:
    def expected(word: int, at: int, key: int) -> int:
        mask = (1 << 64) - 1
        z = word ^ ((at + key) & mask)
        for shift, by in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = ((z ^ (z >> shift)) * by) & mask
        return z ^ (z >> 31)

    word = 0x0123456789ABCDEF
    lanes = "".join(f"{expected(word, at, key):016x}" for at, key in module._LANES)
    assert mix128(torch.tensor([word]).view(torch.uint8)) == f"{lanes}-8"


def answered(x: Tensor, question: dict[str, Any], kind: Any) -> Any:
    """The answer of a rank that has this tensor."""
    answer = answer_elements(x, Question(**question))
    return None if answer is None else typed(answer, kind)


@pytest.mark.parametrize("place", [0, 63, 64, 4095, 4096, 77_776, 99_999])
def test_the_first_difference_is_found_with_few_questions(place: int) -> None:
    x = torch.arange(100_000.0).view(100, 1000)
    y = x.clone()
    y.view(-1)[place] = -1.0
    y.view(-1)[-1] = -2.0
    asked: list[int] = []

    def ask(rank: int, question: dict[str, int], kind: Any) -> Any:
        asked.append(rank)
        return answered((x, y)[rank], question, kind)

    found = locate(ask, [0, 1], [100, 1000])
    assert found is not None and found.index == divmod(place, 1000)
    assert found.values[0] == repr(float(place)) and len(asked) <= 6


def test_equal_tensors_have_no_first_difference() -> None:
    x = torch.ones(1000)
    assert locate(lambda rank, *asked: answered(x, *asked), [0, 1], [1000]) is None


@pytest.mark.parametrize("size", [100, 1000])
def test_an_answer_that_does_not_fit_the_question_is_no_answer(size: int) -> None:
    """A peer may send any number of hashes or elements, or ask for elements that a tensor does not have."""
    x, y = torch.zeros(size), torch.ones(size)

    def ask(rank: int, question: dict[str, int], kind: Any) -> Any:
        found = answered((x, y)[rank], question, kind)
        return found.model_copy(update={"hashes": found.hashes[:-1], "elements": found.elements[:-1]} if rank else {})

    assert locate(ask, [0, 1], [size]) is None
    for start, stop in ((0, size + 1), (5, 5), (7, 3), (size, size + 64)):
        assert answer_elements(x, Question(elements="x", start=start, stop=stop)) is None
    assert answer_elements(None, Question(elements="gone", start=0, stop=1)) is None


class Wrapped(Tensor):
    """A quantised weight, say: its parts, and a function as context."""

    @staticmethod
    def __new__(cls, inner: Tensor, context: object) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner, made.context = inner, context  # type: ignore[attr-defined]  # a Tensor takes any attribute
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Wrapped:
        return Wrapped(args[0].inner, args[0].context)  # only `detach` comes here

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["inner"], self.context  # type: ignore[attr-defined]  # set in __new__, as above


def test_functions_and_device_indices_in_the_context_of_a_wrapper_do_not_count() -> None:
    weight = torch.ones(2, 2)
    contexts = [(lambda x: x, f"cuda:{rank}") for rank in range(2)]
    assert repr(contexts[0]) != repr(contexts[1])
    assert fingerprint(Wrapped(weight, contexts[0])) == fingerprint(Wrapped(weight, contexts[1]))
    assert fingerprint(Wrapped(weight, "int4")) != fingerprint(Wrapped(weight, "int8"))
    assert fingerprint(Wrapped(weight, "int4")) != fingerprint(Wrapped(weight + 1, "int4"))


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (torch.tensor([0.0, 2.0, 0.0]), "first difference at [1]: 0.0 on rank 0, 2.0 on rank 1"),
        (torch.zeros(4), ""),
        (torch.zeros(3, dtype=torch.float64), ""),
        (torch.zeros(3, device="meta"), ""),
    ],
    ids=["value", "shape", "dtype", "no data"],
)
def test_the_first_difference_is_looked_for_in_tensors_of_one_dtype_and_shape(other: Tensor, found: str) -> None:
    tensors = (torch.zeros(3), other)
    row = [((rank,), fingerprint(tensor)) for rank, tensor in enumerate(tensors)]
    assert located(lambda rank, *asked: answered(tensors[rank], *asked), row, "x") == found


def test_a_tensor_that_a_rank_does_not_have_is_not_looked_for() -> None:
    assert located(lambda *asked: pytest.fail("asked"), [((0,), "float32[3] sha256:0"), ((1,), None)], "x") == ""
