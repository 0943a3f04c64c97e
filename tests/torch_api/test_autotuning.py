"""What Inductor times goes through `shared_timings`, and what it chooses follows from what that returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import select_algorithm
from torch._inductor.codecache import PersistentCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import run_and_get_code

from tpcompile.torch_api.autotuning import OPTIONS, shared_timings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b).relu()


@pytest.fixture(params=["of this Python", "as on 3.12"])
def precompile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it times the candidates torch compiles them, but not on Python 3.11.8 and before."""
    if request.param == "as on 3.12":
        python = SimpleNamespace(version_info=SimpleNamespace(major=3, minor=12, micro=3))
        monkeypatch.setattr(select_algorithm, "sys", python)
        monkeypatch.setattr(select_algorithm, "get_num_workers", lambda: 2)


@pytest.mark.usefixtures("precompile")
@pytest.mark.parametrize("winner", ["bmm", "cpp_"])
def test_the_candidate_with_the_least_shared_time_is_the_one_that_is_generated(winner: str) -> None:
    asked: list[tuple[str, Sequence[str]]] = []

    def share(what: str, candidates: Sequence[str], times: Callable[[], list[float]]) -> list[float]:
        asked.append((what, candidates))
        return [1.0 if name.startswith(winner) else 2.0 for name in candidates]

    x = torch.ones(2, 16, 16)
    with shared_timings(share):
        _, (code,) = run_and_get_code(torch.compile(product, options=OPTIONS), x, x)
    ((what, candidates),) = asked
    assert what.startswith("bmm of ")
    assert [name[:4] for name in candidates] == ["bmm", "cpp_"]
    assert ("extern_kernels.bmm" in code) == (winner == "bmm")


class Launcher:
    def __init__(self, config: str) -> None:
        self.config = config


class Kernel(CachingAutotuner):
    """A generated kernel with two launch settings."""

    def __init__(self) -> None:
        self.launchers = [Launcher("a"), Launcher("b")]
        self.fn = product


def test_times_of_launch_settings_are_shared() -> None:
    asked = []

    def share(*what: Any) -> list[float]:
        asked.append(what[:2])
        return [5.0, 4.0]

    with shared_timings(share):
        kernel = Kernel()
        assert [(one.config, ms) for one, ms in kernel.benchmark_all_configs().items()] == [("a", 5.0), ("b", 4.0)]
    assert asked == [("kernel product", ["a", "b"])]
    with pytest.raises(AttributeError):  # torch's own, which looks at what a real kernel has
        kernel.benchmark_all_configs()


def test_a_look_into_the_cache_alone_is_not_shared() -> None:
    def refuse(*_args: Any) -> list[float]:
        raise AssertionError("shared")

    with shared_timings(refuse):
        assert PersistentCache().lookup([], "mm", "", None) == {}
        assert PersistentCache().lookup([], "mm", "", benchmark=None) == {}
