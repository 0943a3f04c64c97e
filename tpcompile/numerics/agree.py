"""Tensors that each rank drew -> ConfigError on all ranks, with the tensor and the ranks, unless all are equal."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.collectives import api as collectives
from tpcompile.errors import ConfigError
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.text.ranks import named_ranks


def check_equal_on_ranks(
    what: str, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None, device: torch.device, *, todo: str
) -> None:
    """Raise when a tensor of the same name is not equal, bit for bit, on all ranks of the group; all ranks call it."""
    own = {name: _bits_text(tensor) for name, tensor in tensors.items()}
    texts_by_rank = texts_of_all_ranks(json.dumps(own), group, device)
    by_rank = list(map(json.loads, texts_by_rank))
    for name in dict.fromkeys(chain.from_iterable(by_rank)):
        texts = [found.get(name, "missing") for found in by_rank]
        if len(set(texts)) > 1:
            ranks_of_text = grouped(range(len(texts)), texts.__getitem__)
            sides = "; ".join(f"{text} on {named_ranks(ranks)}" for text, ranks in ranks_of_text.items())
            raise ConfigError(f"{what} differ between ranks: {name} is {sides}. {todo}")


def texts_of_all_ranks(text: str, group: dist.ProcessGroup | None, device: torch.device) -> list[str]:
    """The text of every rank, in rank order; sent as bytes, because a pickle could run code of a peer."""
    if group is None or group.size() == 1:
        return [text]
    own_bytes = bytearray(text.encode())
    data = torch.frombuffer(own_bytes, dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    sizes = collectives.all_gather_single(size, dim=0, group=group).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    rows = collectives.all_gather_single(padded, dim=0, group=group).view(len(sizes), -1).cpu()
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def _bits_text(tensor: Tensor) -> str:
    """`float32[2, 4] 1f2e`: dtype, shape and a hash of the bytes."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    raw = real.detach().cpu().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(ctypes.string_at(raw.data_ptr(), raw.numel())).hexdigest()  # numpy need not be installed
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {digest[:12]}"
