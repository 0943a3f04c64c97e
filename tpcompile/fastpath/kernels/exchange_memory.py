"""The memory of an exchange on the host: where it is, how large it is, and what is wrong after a wait that ended early.

The protocol is in `exchange`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.errors import FastPathError
from tpcompile.fastpath import peers
from tpcompile.fastpath.in_turn import Turns
from tpcompile.fastpath.kernels.closing import REFUSED_AT, close, refused_call
from tpcompile.fastpath.kernels.exchange import _ADDRESSES, _LATE, _MAX_POLLS, _RANK
from tpcompile.torch_api import symmetric

MAX_RANKS = 16
"""Ranks that have two words each in a warp."""
LIMIT_S = 30.0
"""About how long a wait may take."""
_POLL_US = 0.2
"""A poll, measured on two H200: the parts `absent rank` of results/h200x2-exchange.json."""
_NUMBERS: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""Numbers of the exchanges of each group, which its ranks make together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """Memory through which the ranks of one group exchange rows, in the kernels of one stream.

    Groups, streams and graphs that run at the same time need one each. All ranks make the same calls with it, in the
    same order and with the same number of rows.
    """

    state: Tensor = field(repr=False)
    """What kernels are given: int64 on the device."""
    num_ranks: int
    num_rows: int
    """Most rows of a call."""
    row_words: int
    """Most words of a row."""
    num_programs: int
    """Multiprocessors that it may fill with programs, which all must be on the GPU at once, beside those of others."""
    memory: Any = field(repr=False)
    """Keeps the words."""
    group: Any = field(default=None, repr=False)
    """Whose ranks it joins; None when it was made from addresses."""
    name: str = ""
    """Equal on these ranks, different for each of their exchanges; empty when it was made from addresses."""
    turns: Turns = field(default_factory=Turns, repr=False)
    """Calls of this process with it."""

    def __post_init__(self) -> None:
        peers.follow(self)

    @classmethod
    def between(
        cls,
        addresses: list[int],
        *,
        rank: int,
        num_rows: int,
        row_words: int,
        memory: Tensor,
        num_programs: int = 132,
        max_polls: int | None = None,
        group: Any = None,
    ) -> Self:
        """The side of `rank`, a number within the group, given where the words of all ranks are.

        `memory` are this rank's own words: `num_words` of int64, which were zero before any rank starts. If it is
        `num_shared` of them, its peers can end its waits: see `close`. A wait ends after `max_polls`, by default those
        of `LIMIT_S`. Raises FastPathError for more ranks than a warp can poll at once.
        """
        if len(addresses) > MAX_RANKS:
            raise FastPathError(f"an exchange of {len(addresses)} ranks; at most {MAX_RANKS} write to each other")
        if row_words % 2:
            raise FastPathError(f"an exchange of rows of {row_words} words; rows of 16 bytes need an even number")
        if max_polls is None:
            max_polls = polls_in(LIMIT_S)
        numbers = [rank, max_polls, 0, num_rows, row_words, *addresses, *[0] * num_rows]
        size = num_words(len(addresses), num_rows=num_rows, row_words=row_words)
        state = memory[size:] if memory.numel() > size else memory.new_empty(len(numbers))
        return cls(
            state=state.copy_(torch.tensor(numbers)),
            num_ranks=len(addresses),
            num_rows=num_rows,
            row_words=row_words,
            num_programs=num_programs,
            memory=memory[:size],
            group=group,
        )

    @classmethod
    def of_group(cls, group: Any, *, num_rows: int, row_words: int, device: torch.device, **limits: int) -> Self:
        """This rank's side, in symmetric memory of a process group: a collective call. `limits` as in `between`.

        Without `num_programs` grids have a program for each multiprocessor of the smallest GPU. Raises FastPathError on
        a device that is no GPU, and on all ranks when they pass different `num_programs`.
        """
        if torch.device(device).type != "cuda":
            raise FastPathError(f"an exchange needs GPUs that reach each other's memory, and the device is {device}")
        own = torch.cuda.get_device_properties(device).multi_processor_count
        limits["num_programs"] = agreed_programs(group, own, wanted=limits.get("num_programs"))
        size = num_shared(group.size(), num_rows=num_rows, row_words=row_words)
        shared = symmetric.zeros(size, group=group, device=device)
        side = cls.between(
            shared.addresses,
            rank=group.rank(),
            num_rows=num_rows,
            row_words=row_words,
            memory=shared.words,
            group=group,
            **limits,
        )
        symmetric.meet(group, device)  # every state is there before a peer may write to it
        _load_close(group.size(), device)
        number = next(_NUMBERS[group.group_name])
        return replace(side, name=f"{group.group_name}/{number}")

    def close(self) -> None:
        """End all waits for this rank, now and later, on every rank: what they compute is NaN, and `check` raises.

        For a call that the peers make and this rank does not. The exchange cannot be used after that. Nothing is done
        when the peers cannot be reached: where `between` was given `num_words`.
        """
        if not self._is_reachable:
            return
        with self.turns.behind(self.state.device):
            close(self.state, num_ranks=self.num_ranks, num_rows=self.num_rows)

    @property
    def _is_reachable(self) -> bool:
        """True when the state lies behind the words, where peers look for it."""
        return self.state.data_ptr() == self.memory.data_ptr() + self.memory.nbytes

    def check(self) -> None:
        """Raise FastPathError when a wait ran out, or a rank refused a call: with the ranks. Waits for the device.

        The exchange cannot be used after that. When several ranks report, look at those that all of them name at the
        smallest epoch: others may have waited for them too.
        """
        late = int(self.state[_LATE.value]) % 2**64  # unsigned
        if not late:
            return
        epoch = late >> 32
        refused = _ranks(late >> REFUSED_AT)
        if refused:
            raise FastPathError(
                f"{refused} of the group refused exchange {epoch} before its launch; what rank "
                f"{int(self.state[_RANK.value])} computed since is NaN"
            )
        named = _ranks(late)
        limit = int(self.state[_MAX_POLLS.value])
        raise FastPathError(
            f"{named} of the group did not arrive at exchange {epoch} within {limit} polls of rank "
            f"{int(self.state[_RANK.value])}; what was computed since is NaN. Look at {named} first"
        )

    def check_call(self, op: str, x_D: Tensor, row_words: int) -> None:
        """Raise FastPathError for a call with rows of `x_D` that is not for this exchange: too large, or elsewhere.

        Compiled code raises it where it is run, so that peers are not left waiting by a rank that does not compile.
        """
        num_rows = x_D.shape[:-1].numel()
        why = ""
        if num_rows > self.num_rows or row_words > self.row_words:
            why = f"{num_rows} rows of {row_words} words; the exchange holds {self.num_rows} of {self.row_words}"
        elif x_D.device != self.state.device:
            why = f"the tensors are on {x_D.device} and the exchange on {self.state.device}"
        if why and torch.compiler.is_compiling():
            refused_call(self.state, f"{op}: {why}")
        elif why:
            raise FastPathError(f"{op}: {why}")


def polls_in(seconds: float) -> int:
    """As many polls of a wait as take about that time on an H200."""
    return int(seconds / _POLL_US * 1e6)


def num_words(num_ranks: int, *, num_rows: int, row_words: int) -> int:
    """Words of int64 that every rank owns, and its peers write."""
    return 2 * num_ranks * num_rows * row_words


def num_shared(num_ranks: int, *, num_rows: int, row_words: int) -> int:
    """The same, and the state of its kernels behind them."""
    return num_words(num_ranks, num_rows=num_rows, row_words=row_words) + _ADDRESSES.value + num_ranks + num_rows


def agreed_programs(group: Any, num_multiprocessors: int, *, wanted: int | None) -> int:
    """Collective: what all ranks want, or the least number of multiprocessors of a rank when none says.

    Raises FastPathError on all ranks when they want different numbers: ranks with different grids may wait forever.
    """
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (wanted, num_multiprocessors), group=group)
    if len({wanted for wanted, _ in found}) > 1:
        texts = [f"{wanted} on rank {rank}" for rank, (wanted, _) in enumerate(found)]
        raise FastPathError(
            f"an exchange with different num_programs: {' / '.join(texts)}; all ranks must pass the same"
        )
    return min(limit if wanted is None else wanted for wanted, limit in found)


def _ranks(bits: int) -> str:
    """`rank 1` or `ranks 1, 3`: those of the lowest bits that are set; empty for none."""
    numbers = [str(rank) for rank in range(MAX_RANKS) if bits >> rank & 1]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}" if numbers else ""


def _load_close(num_ranks: int, device: torch.device) -> None:
    """Compile and load the kernel of `close`, on memory of its own: peers wait for a rank that needs it."""
    rows = {"num_rows": 1, "row_words": 2}
    memory = torch.zeros(num_shared(num_ranks, **rows), dtype=torch.int64, device=device)
    Exchange.between([memory.data_ptr()] * num_ranks, rank=0, memory=memory, **rows).close()
    torch.cuda.synchronize(device)
