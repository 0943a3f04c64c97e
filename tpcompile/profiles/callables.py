"""Program and profile -> a callable that runs it so, the same on all ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self, get_args

import torch
import torch.distributed as dist
from torch import nn

from tpcompile.choices import Profile
from tpcompile.errors import ConfigError
from tpcompile.profiles import chosen
from tpcompile.profiles.agreement import Agreement, Vote
from tpcompile.profiles.cuda_graphs import CudaGraphs
from tpcompile.profiles.graphed import Graphed
from tpcompile.ranks.groups import GroupLike, resolve_group


def run(
    program: Callable[..., Any],
    profile: Profile = "default",
    *,
    group: GroupLike = None,
    is_compiled: bool = False,
    dynamic: bool | None = None,
    static: Collection[int | str] = (),
    clone_outputs: bool = False,
    max_graphs: int = 8,
    timeout_s: float = 120.0,
    name: str = "",
) -> Profiled:
    """Compile a module or function and run it under a profile; every rank of the group calls this alike.

        with tpcompile.run(model, profile="graphed") as fast:
            y = fast(x)

    `default` is torch.compile with one graph. `graphed` also makes one CUDA graph of all that a call launches, its
    collectives included: for each new signature (shapes, strides, dtypes, constants, grad mode) the program is called
    3 times, captured, and replayed from then on. Tensors of the arguments are copied to buffers of the graph. The
    outputs are the same tensors at every call, overwritten by the next call of any signature. Weights may be written
    in place and must not be replaced. In training, the program is a whole step: it calls backward, zeroes gradients in
    place or returns them, and leaves the optimizer out, which the warm-up would step as well.

    group: whose ranks run it, as `tpcompile.collectives` takes one; None is all ranks of the job. Before the first
        call, and before each capture, they compare through the store what they run.
    is_compiled: the program calls torch.compile itself, as a whole step does.
    dynamic: of torch.compile.
    static: positions and names of arguments whose tensors a graph reads and writes where they are, such as caches.
    clone_outputs: return copies, which later calls leave alone.
    max_graphs: live CUDA graphs; the least recently used one goes for a new one.
    timeout_s: how long a rank waits for the others before it names them.
    name: what messages call the program; by default its class or function.

    CUDA graphs are released by `close`, by the end of a `with`, before a process group is destroyed, and at exit; a
    captured communicator would wait for them for ever. Raises ConfigError for an unknown profile, for `graphed`
    without CUDA, and for a program or arguments that cannot be captured; DivergenceError, on all ranks, where they run
    different profiles or signatures, or where a rank does not come.
    """
    if profile not in get_args(Profile):
        raise ConfigError(f"unknown profile {profile!r}; choose from {', '.join(get_args(Profile))}")
    if max_graphs < 1:
        raise ConfigError(f"max_graphs={max_graphs}; at least 1 graph must fit")
    if profile == "graphed" and not torch.cuda.is_available():
        raise ConfigError('profile="graphed" needs CUDA, which is not available here; use profile="default"')
    compiled = program if is_compiled else torch.compile(program, fullgraph=True, dynamic=dynamic)
    steps = _Steps(name or label_of(program), profile, _agreement(group, timeout_s=timeout_s))
    call = compiled
    if profile == "graphed":
        call = Graphed(
            compiled, CudaGraphs(), label=steps.label, agree=steps.capture, modules=program, static=static,
            clone_outputs=clone_outputs, max_graphs=max_graphs,
        )  # fmt: skip
    return Profiled(call, steps)


def label_of(program: Callable[..., Any]) -> str:
    """What a program is called: its class or its function."""
    if isinstance(program, nn.Module):
        module = getattr(program, "_orig_mod", program)  # of a compiled one
        return type(module).__name__
    return getattr(program, "__qualname__", type(program).__name__).replace(".<locals>", "")


class Profiled:
    """A program under a profile, called as the program itself; made by `tpcompile.run`."""

    def __init__(self, call: Callable[..., Any], steps: _Steps) -> None:
        self._call, self._steps = call, steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the program returns; under `graphed`, tensors that the next call overwrites."""
        if not self._steps.has_begun:
            self._begin()
        return self._call(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def profile(self) -> str:
        """What it runs under."""
        return self._steps.profile

    @property
    def num_captures(self) -> int:
        """CUDA graphs that were captured so far."""
        return self._call.num_captures if isinstance(self._call, Graphed) else 0

    @property
    def num_replays(self) -> int:
        """Calls that were replays of a CUDA graph."""
        return self._call.num_replays if isinstance(self._call, Graphed) else 0

    def close(self) -> None:
        """Release its CUDA graphs; it must not be called again."""
        self._steps.close()
        if isinstance(self._call, Graphed):
            self._call.release()
        self._call = _closed(self._steps.label)

    def _begin(self) -> None:
        if not isinstance(self._call, Graphed):  # which compares each signature
            self._steps.begin()


class _Steps:
    """What the ranks compare of one callable, and when."""

    def __init__(self, label: str, profile: str, agreement: Agreement | None) -> None:
        self.label, self.profile = label, profile
        self.has_begun = False
        self._agreement = agreement
        self._choice = chosen.add(label, profile)

    def begin(self) -> None:
        """At the first call."""
        self._agree(Vote(program=self.label, profile=self.profile))

    def capture(self, signature: str) -> None:
        """Before each capture."""
        self._agree(Vote(program=self.label, profile=self.profile, signature=signature))

    def close(self) -> None:
        """No more steps."""
        self._choice.is_open = False

    def _agree(self, vote: Vote) -> None:
        if self._agreement is not None:
            self._agreement.agree(vote)
        self.has_begun = True


def _agreement(group: GroupLike, *, timeout_s: float) -> Agreement | None:
    """Of the ranks of the group; None for a process alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    found = resolve_group(group)
    ranks = dist.get_process_group_ranks(found)
    return Agreement(ranks, timeout_s=timeout_s) if len(ranks) > 1 else None


def _closed(label: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise ConfigError(f"{label} was closed; make a new one with tpcompile.run")

    return refuse
