"""What Inductor times in order to choose between kernels -> times that ranks share; seen on torch 2.11.0 and 2.13.0.

    name                                               why
    codecache.PersistentCache.lookup                   times of the candidates for a matrix product, or their cache
    triton_heuristics.CachingAutotuner.benchmark_all_configs   times of the launch settings of a generated kernel
    config.autotune_local_cache                        both are read from disk, of one rank here

`tests/torch_api/test_autotuning.py` fails when torch moves one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

Share = Callable[[str, Sequence[str], Callable[[], list[float]]], list[float]]
"""(what is tuned, the candidates, what times them on this rank) -> ms of each candidate, the same on all ranks."""

OPTIONS: dict[str, Any] = {
    "max_autotune": True,
    # Each rank would time by itself, and may choose differently:
    "benchmark_epilogue_fusion": False,
    "coordinate_descent_tuning": False,
    # A rank that loads a choice from its disk would time nothing, and the others wait for it.
    "autotune_local_cache": False,
    "fx_graph_cache": False,
}
"""Options of torch.compile under which all that Inductor times goes through `shared_timings`."""

_sharing: Share | None = None
_NUMBER = re.compile(r"_\d+$")


@contextmanager
def shared_timings(share: Share) -> Iterator[None]:
    """What is compiled and launched inside chooses by the times that `share` returns."""
    global _sharing
    _install()
    before, _sharing = _sharing, share
    try:
        yield
    finally:
        _sharing = before


@cache
def _install() -> None:
    """Replace both functions, once in a process and not at import: the two modules import Triton."""
    from torch._inductor import config
    from torch._inductor.codecache import PersistentCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    lookup, benchmark_all = PersistentCache.lookup, CachingAutotuner.benchmark_all_configs

    # `benchmark` is torch's name for it, by which some of its calls pass it.
    def shared_lookup(self: Any, choices: Any, op: str, inputs: str, benchmark: Any, **options: Any) -> Any:
        if _sharing is None or benchmark is None:
            return lookup(self, choices, op, inputs, benchmark, **options)

        def times() -> list[float]:
            with config.patch(autotune_local_cache=True):
                found = lookup(self, choices, op, inputs, benchmark, **options)
            return [found[choice] for choice in choices]

        # The number in a name counts all candidates of the process: it differs where ranks have compiled differently.
        names = [_NUMBER.sub("", choice.name) for choice in choices]
        return dict(zip(choices, _sharing(f"{op} of {inputs}", names, times), strict=True))

    def shared_benchmark(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _sharing is None:
            return benchmark_all(self, *args, **kwargs)
        launchers = list(self.launchers)

        def times() -> list[float]:
            found = benchmark_all(self, *args, **kwargs)
            return [found[launcher] for launcher in launchers]

        settings = [str(launcher.config) for launcher in launchers]
        return dict(zip(launchers, _sharing(f"kernel {self.fn.__name__}", settings, times), strict=True))

    PersistentCache.lookup = shared_lookup
    CachingAutotuner.benchmark_all_configs = shared_benchmark
