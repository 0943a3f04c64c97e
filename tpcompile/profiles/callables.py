"""Program and profile -> a callable that runs it so, the same on all ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Self, get_args

import torch
import torch.distributed as dist
from torch import nn

from tpcompile.by_size import Sums, Table, sums
from tpcompile.choices import AllReduce, Profile
from tpcompile.errors import ConfigError
from tpcompile.profiles.agreement import Agreement
from tpcompile.profiles.call_times import Measurement, timings
from tpcompile.profiles.cuda_graphs import CudaGraphs
from tpcompile.profiles.gradients import Gradients, modules_of
from tpcompile.profiles.graphed import Graphed
from tpcompile.profiles.steps import Steps
from tpcompile.ranks.groups import GroupLike, resolve_group
from tpcompile.torch_api.autotuning import OPTIONS, shared_timings


def run(
    program: Callable[..., Any],
    profile: Profile = "measured",
    *,
    group: GroupLike = None,
    is_compiled: bool = False,
    all_reduce: AllReduce | Table = "nccl",
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
    place or returns them, and leaves the optimizer out, which the warm-up would step as well. `measured` times both at
    the first call, in some fifty calls, and takes the one whose slowest rank is the fastest. `max-autotune` compiles
    with kernels chosen by time, by the times of the first rank on all ranks; `graphed` may run what it returns.

    group: whose ranks run it, as `tpcompile.collectives` takes one; None is all ranks of the job. Before the first
        call, and before each capture, they compare through the store what they run.
    is_compiled: the program calls torch.compile itself, as a whole step does; for `max-autotune` with
        `options=tpcompile.profiles.TUNED`.
    all_reduce: `by_size` sums over the ranks, in its compiled graphs, by the algorithm that was measured to be fastest
        at the size of the message on this GPU: all ranks measure here what the machine has not measured before. A
        `tpcompile.by_size.Table` is one of your own. A program that is compiled already must have been with the options
        of `tpcompile.by_size.sums(all_reduce, group)`.
    dynamic: of torch.compile.
    static: positions and names of arguments whose tensors a graph reads and writes where they are, such as caches.
    clone_outputs: return copies, which later calls leave alone.
    max_graphs: live CUDA graphs; the least recently used one goes for a new one.
    timeout_s: how long a rank waits for the others before it names them.
    name: what messages call the program; by default its class or function.

    CUDA graphs are released by `close`, by the end of a `with`, before a process group is destroyed, and at exit; a
    captured communicator would wait for them for ever. Raises ConfigError for an unknown profile, for `graphed` where
    there are no GPUs with NCCL, and for a program or arguments that cannot be captured; DivergenceError, on all ranks,
    where they run different profiles or signatures, or where a rank does not come.
    """
    if profile not in get_args(Profile):
        raise ConfigError(f"unknown profile {profile!r}; choose from {', '.join(get_args(Profile))}")
    if max_graphs < 1:
        raise ConfigError(f"max_graphs={max_graphs}; at least 1 graph must fit")
    found_group = resolve_group(group)
    why_not = no_graphs(found_group)
    if profile == "graphed" and why_not:
        raise ConfigError(f'profile="graphed" needs GPUs with NCCL, and {why_not}; use profile="default"')
    found_sums = sums(all_reduce, found_group, timeout_s=timeout_s)
    options = options_of(profile, found_sums)
    compiled = program if is_compiled else torch.compile(program, fullgraph=True, dynamic=dynamic, options=options)
    ranks = dist.get_process_group_ranks(found_group) if dist.is_available() and dist.is_initialized() else []
    agreement = Agreement(ranks, timeout_s=timeout_s) if len(ranks) > 1 else None  # a process alone agrees with nobody
    summed = found_sums.text(found_group) if found_sums is not None else "nccl"
    steps = Steps(name or label_of(program), profile, agreement, all_reduce=summed)
    calls: dict[str, Callable[..., Any]] = {"default": compiled}
    if profile == "max-autotune":
        calls = {profile: Tuned(compiled, agreement)}
    elif profile != "default" and not why_not:
        calls["graphed"] = Graphed(
            compiled, CudaGraphs(), label=steps.label, ranks=steps, modules=modules_of(program), static=static,
            clone_outputs=clone_outputs, max_graphs=max_graphs,
        )  # fmt: skip
    return Profiled(program, calls, steps)


def options_of(profile: str, found: Sums | None) -> dict[str, Any] | None:
    """What a profile and sums ask of Inductor; None for nothing."""
    tuned = OPTIONS if profile == "max-autotune" else {}
    summed = found.options if found is not None else {}
    return {**tuned, **summed} or None


def label_of(program: Callable[..., Any]) -> str:
    """What a program is called: its class or its function."""
    if isinstance(program, nn.Module):
        module = getattr(program, "_orig_mod", program)  # torch.compile wraps a module in an OptimizedModule
        return type(module).__name__
    return getattr(program, "__qualname__", type(program).__name__).replace(".<locals>", "")


def no_graphs(group: dist.ProcessGroup | None) -> str:
    """Why no CUDA graph can hold the collectives of the group, None for all ranks; empty where one can."""
    if not torch.cuda.is_available():
        return "CUDA is not available here"
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    backends = dist.get_backend_config(group)
    return "" if "cuda:nccl" in backends else f"the backends of the group are {backends}"


class Profiled:
    """A program under a profile, called as the program itself; made by `tpcompile.run`."""

    def __init__(self, program: Callable[..., Any], calls: dict[str, Callable[..., Any]], steps: Steps) -> None:
        self._program, self._calls, self._steps = program, calls, steps
        self._call: Callable[..., Any] = self._begin
        self.measurement: Measurement | None = None
        """What `measured` has found, after the first call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the program returns; under `graphed`, tensors that the next call overwrites."""
        return self._call(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def profile(self) -> str:
        """What it runs under; `measured` until the first call has chosen."""
        return self._steps.runs_under

    @property
    def num_captures(self) -> int:
        """CUDA graphs that were captured so far."""
        return sum(graphed.num_captures for graphed in self._graphed())

    @property
    def num_replays(self) -> int:
        """Calls that were replays of a CUDA graph."""
        return sum(graphed.num_replays for graphed in self._graphed())

    def close(self) -> None:
        """Release its CUDA graphs; it must not be called again."""
        self._steps.close()
        for graphed in self._graphed():
            graphed.release()
        self._call = self._refuse

    def _graphed(self) -> list[Graphed]:
        return [call for call in self._calls.values() if isinstance(call, Graphed)]

    def _begin(self, *args: Any, **kwargs: Any) -> Any:
        profile = self._steps.profile
        if profile != "graphed":  # which compares every signature, the first too
            self._steps.begin(candidates=list(self._calls))
        if profile == "measured":
            profile = self._measured(lambda call: call(*args, **kwargs))
        self._call = self._calls[profile]
        return self._call(*args, **kwargs)

    def _measured(self, with_arguments: Callable[[Callable[..., Any]], Any]) -> str:
        if len(self._calls) == 1:
            (only,) = self._calls
            self.measurement = self._steps.chose(Measurement(profile=only))
            return only

        def finish() -> None:
            if torch.cuda.is_available():  # a clock stops where the device has finished
                torch.cuda.synchronize()

        gradients = Gradients(modules_of(self._program), self._steps.label)
        calls = {name: lambda call=call: with_arguments(call) for name, call in self._calls.items()}
        self.measurement = self._steps.choose(timings(calls, finish))
        gradients.restore()
        for name, call in self._calls.items():
            if isinstance(call, Graphed) and name != self.measurement.profile:
                call.release()
        return self.measurement.profile

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ConfigError(f"{self._steps.label} was closed; make a new one with tpcompile.run")


class Tuned:
    """Compiles and calls a program that was compiled with the options of `tpcompile.profiles.TUNED`.

    Ranks compile the same graphs, so they ask for the same times in the same order; a rank that asks for others is
    named. In a process alone, `agreement` is None.
    """

    def __init__(self, program: Callable[..., Any], agreement: Agreement | None) -> None:
        self._program, self._agreement = program, agreement
        self.num_shared = 0
        """Choices that were made so far."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the program returns."""
        with shared_timings(self._share):
            return self._program(*args, **kwargs)

    def _share(self, what: str, candidates: Sequence[str], times: Callable[[], list[float]]) -> list[float]:
        self.num_shared += 1
        if self._agreement is None:
            return times()
        asked = f"{what}: {', '.join(candidates)}"
        return self._agreement.of_first_rank(f"choice {self.num_shared}", asked, times, list[float])
