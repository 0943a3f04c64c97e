"""Tensor -> a short text, equal exactly when dtype, shape and every bit are; hashes of pieces locate a difference.

On the CPU it is SHA-256 of the raw bytes. On other devices the bytes are hashed in place, which saves copying gigabytes
to the host: each 64-bit word is combined with its position, passed through a bijection (splitmix64) and summed modulo
2**64, in two lanes with different constants. A change of one word always changes the sum. Two different tensors have
equal sums in both lanes with a probability of about 2**-128, unless the pair was constructed for it.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpcompile.errors import ConfigError
from tpcompile.evidence.text import normalise
from tpcompile.torch_api import compiler as compat

_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 22
"""Words mixed at a time: bounds the temporaries to about 100 MB beside the tensor."""
_LANES = ((-7046029254386353131, -4658895280553007687), (-3335678366873096957, -7723592293110705685))
"""Per lane, an odd multiplier of the position and a constant that is added."""
_MIX_1, _MIX_2 = -4658895280553007687, -7723592293110705685  # splitmix64's multipliers as signed numbers


def fingerprint(tensor: Tensor) -> str:
    """dtype, shape and bits of a tensor as one line; the local shard of a DTensor.

    A tensor without data (meta) is described so. Raises ConfigError for layouts without raw bytes (sparse, quantised).
    """
    return f"{describe(tensor)} {bits(tensor)}"


def describe(tensor: Tensor) -> str:
    """`bfloat16[10, 4]`, of the local shard of a DTensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(local_of(tensor).shape)}"


def local_of(tensor: Tensor) -> Tensor:
    """Local shard of a DTensor, awaited result of an asynchronous collective, else the tensor itself."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return compat.settled(tensor.detach())


def bits(tensor: Tensor) -> str:
    """Hash of the bytes alone, with the name of the method."""
    local = local_of(tensor)
    if hasattr(local, "__tensor_flatten__"):  # a wrapper of several tensors, e.g. a quantised weight
        names, context = local.__tensor_flatten__()
        inner = [f"{name}={fingerprint(getattr(local, name))}" for name in names]
        says = normalise.device(normalise.objects(str((inner, context))))  # a context may hold functions and devices
        return f"wrapped:{hashlib.sha256(says.encode()).hexdigest()}"
    if local.is_meta:
        return "meta: no data"
    method, value = _hash(raw_bytes(local))
    return f"{method}:{value}"


def raw_bytes(tensor: Tensor) -> Tensor:
    """Bytes of a tensor in row-major order, [bytes] uint8; no copy when it is contiguous.

    Raises ConfigError for layouts without raw bytes.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ConfigError(f"no fingerprint of a {tensor.layout} tensor of dtype {tensor.dtype}; pass its dense parts")
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)


def piece_hashes(raw: Tensor, *, start: int, stop: int, size_bytes: int) -> list[str]:
    """Hashes of consecutive pieces of `size_bytes` of raw[start:stop], to find the first that differs."""
    hashes = [_hash(piece) for piece in raw[start:stop].split(size_bytes)]
    return [value for _, value in hashes]


def _hash(raw: Tensor) -> tuple[str, str]:
    """(method, hash) of bytes [n] uint8, computed on their device."""
    if raw.device.type != "cpu":
        return "mix128", mix128(raw)
    if not raw.numel():
        return "sha256", hashlib.sha256().hexdigest()
    # Not through numpy, which need not be installed; the tensor keeps the memory alive.
    memory = (ctypes.c_char * raw.numel()).from_address(raw.data_ptr())
    digest = hashlib.sha256(memory)
    return "sha256", digest.hexdigest()


def mix128(raw: Tensor) -> str:
    """The two 64-bit lanes over bytes [n] uint8 and their number, as hex; equal on every device."""
    totals = torch.zeros(len(_LANES), dtype=torch.int64, device=raw.device)
    for first, words in _words(raw):
        position = torch.arange(first + 1, first + 1 + len(words), dtype=torch.int64, device=raw.device)
        for lane, (at, key) in enumerate(_LANES):
            totals[lane] += splitmix(words ^ (position * at + key)).sum()
    lanes = "".join(f"{total & (1 << 64) - 1:016x}" for total in totals.tolist())  # the one wait for the device
    return f"{lanes}-{raw.numel():x}"


def _words(raw: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(index of the first word, words [n] int64) of the bytes, chunk by chunk; zeros fill the last word."""
    chunk_bytes = _CHUNK_WORDS * _WORD_BYTES
    for start in range(0, raw.numel(), chunk_bytes):
        piece = raw[start : start + chunk_bytes]
        missing = -piece.numel() % _WORD_BYTES
        if missing or piece.storage_offset() % _WORD_BYTES:  # a view as words needs whole, aligned words
            piece = torch.cat((piece, piece.new_zeros(missing)))
        yield start // _WORD_BYTES, piece.view(torch.int64)


def splitmix(words: Tensor) -> Tensor:
    """The finaliser of splitmix64, a bijection on 64-bit words; every input bit affects every output bit."""
    words = (words ^ _shifted(words, 30)) * _MIX_1
    words = (words ^ _shifted(words, 27)) * _MIX_2
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, by: int) -> Tensor:
    """Logical shift to the right; the shift of int64 is arithmetic."""
    return (words >> by) & ((1 << (64 - by)) - 1)
