"""Two sums of a tensor are equal exactly when all of its bits are; one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tpcompile.sentinel import device_sums
from tpcompile.sentinel.device_sums import sums

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int8, torch.uint8,
          torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]  # fmt: skip


def of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(sums(tensor).tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (3,), ()])
def test_one_bit_of_any_dtype_changes_both_sums(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    num_bytes = max(1, torch.Size(shape).numel()) * dtype.itemsize
    raw = torch.randint(0, 2, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    x, y = raw.clone().view(dtype).view(shape), raw.clone().view(dtype).view(shape)
    assert of(x) == of(y)
    y.view(-1).view(torch.uint8)[-1] ^= 1
    assert all(one != other for one, other in zip(of(x), of(y), strict=True))


def test_one_unit_in_the_last_place_is_seen() -> None:
    x = torch.randn(1000)
    y = x.clone()
    y[617] = torch.nextafter(x[617], torch.tensor(torch.inf))
    assert of(x) != of(y)


def test_order_and_signs_count_and_layout_does_not() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert of(x) == of(x.t().contiguous().t()) == of(torch.cat((x, x))[3:])
    assert of(x) != of(x.flip(0)) and of(x) != of(x.roll(1, 1))
    signs = torch.ones(6)
    signs[[1, 3]] = -1.0  # flips the highest bit of two words, which a sum modulo 2**64 could lose
    assert of(signs) != of(torch.ones(6))
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))


def test_payloads_of_nan_count() -> None:
    nans = [torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001)]
    assert of(nans[0]) != of(nans[1]) and of(nans[0]) == of(nans[0].clone())


def test_a_view_that_is_not_aligned_to_words_is_read_as_what_it_holds() -> None:
    raw = torch.arange(11, dtype=torch.uint8)
    assert of(raw[1:]) == of(raw[1:].clone())
    assert of(torch.empty(0)) == (0, 0)


def test_rows_of_a_large_tensor_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sums, "_ROW_WORDS", 16)
    x = torch.randn(4, 16)
    assert of(x) == of(x.clone())
    assert len({of(x), of(x.flip(0)), of(x[:3]), of(x[[0, 2, 1, 3]])}) == 4


def test_no_two_of_many_small_changes_have_equal_sums() -> None:
    base = torch.zeros(64, dtype=torch.uint8)
    seen = {of(base)}
    for position in range(64):
        for bit in range(8):
            changed = base.clone()
            changed[position] = 1 << bit
            seen.add(of(changed))
    assert len(seen) == 513


def test_they_are_the_same_in_inference_mode() -> None:
    device_sums._numbers.clear()
    device_sums._numbers_of.cache_clear()
    x = torch.arange(5)
    with torch.inference_mode():
        inside = of(x)
    assert of(x) == inside
