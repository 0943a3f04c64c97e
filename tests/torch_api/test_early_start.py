"""A captured launch depends on the start of the kernel before it; everything else is launched as ever."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from tpcompile.torch_api import early_start

KERNEL, COPY = 0, 1


class Driver:
    """A stream that is captured or not, and what its next kernel depends on."""

    def __init__(self, *kinds: int, capturing: bool = True, failure: int = 0) -> None:
        self.kinds, self.capturing, self.failure = kinds, capturing, failure
        self.set: list[tuple[int, int, int, int]] = []

    def cuStreamGetCaptureInfo_v3(self, _stream: Any, status: Any, *rest: Any) -> int:
        _number, _graph, nodes, _edges, count = (one._obj for one in rest)
        status._obj.value = int(self.capturing)
        count.value = len(self.kinds)
        self.nodes = (ctypes.c_void_p * max(1, len(self.kinds)))(*range(7, 7 + len(self.kinds)))
        nodes.contents = ctypes.c_void_p.from_buffer(self.nodes)
        return self.failure

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.kinds[node.value - 7]
        return 0

    def cuStreamUpdateCaptureDependencies_v2(self, _stream: Any, nodes: Any, edges: Any, count: Any, flags: Any) -> int:
        assert count.value == 1
        self.set.append((nodes[0], edges[0].from_port, edges[0].type, flags.value))
        return 0


def test_after_one_kernel_the_next_starts_when_all_its_programs_have(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(KERNEL)
    monkeypatch.setattr(early_start, "_driver", lambda: driver)
    assert early_start.start_next_early(1)
    assert driver.set == [(7, 2, 1, 1)]  # launch order, programmatic, in place of the ordinary dependency


@pytest.mark.parametrize(
    "driver",
    [Driver(COPY), Driver(KERNEL, KERNEL), Driver(), Driver(KERNEL, capturing=False), Driver(KERNEL, failure=1), None],
    ids=["a copy", "two kernels", "nothing", "no capture", "failure", "no driver"],
)
def test_in_every_other_case_nothing_is_changed(driver: Driver | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "_driver", lambda: driver)
    assert not early_start.start_next_early(1)
    assert driver is None or driver.set == []


def test_a_kernel_is_told_once() -> None:
    hooks: list[Any] = []
    kernel = SimpleNamespace(pre_run_hooks=hooks, add_pre_run_hook=hooks.append)
    early_start.let_start_early(kernel)
    early_start.let_start_early(kernel)
    assert len(hooks) == 1
