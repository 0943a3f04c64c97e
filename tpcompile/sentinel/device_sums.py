"""Tensor -> two 64-bit sums on its device, equal exactly when all bits are: without waiting for the device.

Each 32-bit word is multiplied by an odd 64-bit number that belongs to its position, and the products are summed modulo
2**64, in two lanes. One word that changes always changes both sums, and so does an exchange of two unequal words but
for one case in about 2**31 a lane. Integers add up to the same in any order, so the sums of one tensor are equal on
every device and in every run. Two kernels and a copy, where a cryptographic hash has no kernel in torch.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tpcompile.preflight.fingerprint import raw_bytes, splitmix

LANES = 2
_WORD_BYTES = 4
_ROW_WORDS = 1 << 21
"""Words that are summed at a time: bounds the products to 32 MB beside the tensor."""
_SEEDS = (-7046029254386353131, -3335678366873096957)
"""Per lane, an odd multiplier of the position, from which its number is made."""
_numbers: dict[torch.device, Tensor] = {}
"""Device -> the numbers of the first positions, [LANES, positions] int64."""


def sums(tensor: Tensor) -> Tensor:
    """[LANES] int64 on the device of a plain tensor of any dtype and shape. Raises ConfigError without raw bytes."""
    with torch.no_grad():
        words = _words(raw_bytes(tensor))
        rows = words.split(_ROW_WORDS)
        if len(rows) == 1:
            return _of_row(words)
        total = torch.zeros(LANES, dtype=torch.int64, device=words.device)
        for number, row in enumerate(rows):
            total += splitmix(_of_row(row) + number)  # else rows could be exchanged
        return total


def _of_row(words: Tensor) -> Tensor:
    return (words * _numbers_of(words.device, len(words))).sum(1)


def _words(raw: Tensor) -> Tensor:
    """Bytes [n] uint8 -> [ceil(n / 4)] int32; zeros fill the last word."""
    missing = -raw.numel() % _WORD_BYTES
    if missing or raw.storage_offset() % _WORD_BYTES:  # a view as words needs whole, aligned words
        raw = torch.cat((raw, raw.new_zeros(missing)))
    return raw.view(torch.int32)


@lru_cache(maxsize=64)  # to cut them anew costs half as much as to multiply with them
def _numbers_of(device: torch.device, num_words: int) -> Tensor:
    """The odd numbers of the positions, [LANES, num_words] int64; made once for a power of two of positions."""
    known = _numbers.get(device)
    if known is None or known.shape[1] < num_words:
        num_made = 1 << max(10, (num_words - 1).bit_length())
        with torch.inference_mode(False):  # they outlive the mode of the caller
            position = torch.arange(1, num_made + 1, dtype=torch.int64, device=device)
            known = _numbers[device] = torch.stack([splitmix(position * seed) | 1 for seed in _SEEDS])
    return known[:, :num_words]
