"""Energy of a step, from a counter that moves ten times a second."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bench.samples import MACHINE, measured, row
from tpcompile import config
from tpcompile.bench import power as module
from tpcompile.bench.names import Name
from tpcompile.bench.power import Meter, NoMeterError, Sample, drawn, power
from tpcompile.bench.records import Power
from tpcompile.bench.run import Plan, _Preset
from tpcompile.bench.table import lines

DEVICE = torch.device("cuda", 0)
FOUND = Power(watts=698.2, joules=6.98, mhz=1545, most_mhz=1980, limit_watts=700.0, at_limit=True)


class FakeError(Exception):
    """As NVML's."""


def samples(watts: float, *, idle_s: float = 0.0, at_limit: bool = True) -> list[Sample]:
    """A second of a GPU whose counter moves at each 0.1 s, read every 5 ms; the clock was higher while it idled."""
    found = []
    for number in range(200):
        at_s = number * 0.005
        moved_s = max(0.0, (number // 20) * 0.1 - idle_s)
        is_idle = at_s < idle_s
        found.append(Sample(at_s, 5e4 + watts * moved_s, 1980 if is_idle else 1545, at_limit and not is_idle))
    return found


def test_watts_are_those_between_moves_of_the_counter() -> None:
    found = power(samples(600.0, idle_s=0.6), 10.0, limit_watts=700.0, most_mhz=1980)
    assert found.watts == pytest.approx(600.0)
    assert found.joules == pytest.approx(6.0)  # 10 ms of them
    assert (found.mhz, found.at_limit) == (1545, True)


def test_a_gpu_that_is_not_held_down_for_most_of_the_time_is_not_called_so() -> None:
    never = samples(300.0, at_limit=False)
    assert not power(never, 10.0, limit_watts=700.0, most_mhz=1980).at_limit
    sometimes = [one._replace(at_limit=number % 3 == 0) for number, one in enumerate(never)]
    assert not power(sometimes, 10.0, limit_watts=700.0, most_mhz=1980).at_limit


def test_a_counter_that_is_reset_is_no_measurement() -> None:
    found = samples(600.0)
    found[120:] = [one._replace(joules=one.joules - 5e4) for one in found[120:]]
    with pytest.raises(NoMeterError, match="reset"):
        power(found, 10.0, limit_watts=700.0, most_mhz=1980)


def test_two_moves_of_the_counter_are_no_measurement() -> None:
    with pytest.raises(NoMeterError, match=r"2 .* 3 "):
        power(samples(600.0)[:50], 10.0, limit_watts=700.0, most_mhz=1980)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of 700 W whose counter moves at each reading."""
    counter = iter(range(0, 10**9, 7000))
    fake = SimpleNamespace(
        NVMLError=FakeError, NVML_CLOCK_SM=1, nvmlClocksThrottleReasonSwPowerCap=4, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid, nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 700_000,
        nvmlDeviceGetMaxClockInfo=lambda gpu, kind: 1980, nvmlDeviceGetClockInfo=lambda gpu, kind: 1500,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: next(counter),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 4 | 1,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    return fake


def test_calls_are_measured_while_they_run(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def timed(call: Any, num_calls: int, device: torch.device) -> float:
        asked.append(num_calls)
        module.time.sleep(0.1)
        return 10.0

    monkeypatch.setattr(module, "timed_ms", timed)
    found = drawn(lambda: None, 30, DEVICE)
    assert asked == [30]
    assert found.joules == pytest.approx(found.watts * 10.0 / 1e3)
    assert found.watts > 0
    assert (found.mhz, found.most_mhz, found.limit_watts, found.at_limit) == (1500, 1980, 700.0, True)


def test_a_reading_that_fails_is_no_measurement(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the time before it would be those of a part of the calls."""

    def timed(call: Any, num_calls: int, device: torch.device) -> float:
        module.time.sleep(0.1)
        nvml.nvmlDeviceGetClockInfo = lost
        module.time.sleep(0.1)
        return 10.0

    def lost(gpu: object, kind: int) -> int:
        raise FakeError("GPU is lost")

    monkeypatch.setattr(module, "timed_ms", timed)
    threads = threading.active_count()
    with pytest.raises(NoMeterError, match=r"^NVML: GPU is lost$"):
        drawn(lambda: None, 30, DEVICE)
    assert threading.active_count() == threads


def test_the_gpu_is_asked_for_by_its_uuid(nvml: SimpleNamespace) -> None:
    asked: list[str] = []
    nvml.nvmlDeviceGetHandleByUUID = asked.append
    Meter(DEVICE)
    assert asked == ["GPU-12-34"]


def test_without_a_counter_the_calls_are_made_all_the_same(
    nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks make them, and wait for this one in their collectives."""

    def refused(gpu: object) -> int:
        raise FakeError("Not Supported")

    asked: list[int] = []
    monkeypatch.setattr(module, "timed_ms", lambda call, num_calls, device: asked.append(num_calls) or 10.0)
    nvml.nvmlDeviceGetTotalEnergyConsumption = refused
    with pytest.raises(NoMeterError, match=r"^NVML: Not Supported$"):
        drawn(lambda: None, 30, DEVICE)
    assert asked == [30]


def test_without_the_package_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoMeterError, match=r"^pip install 'tpcompile\[energy\]'$"):
        Meter(DEVICE)


class Asked:
    """Ranks that answer alike, whatever they are asked."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers, self.requests = answers, list[tuple[Any, ...]]()

    def ask(self, *request: Any) -> Any:
        self.requests.append(request)
        return self.answers


def asked(tmp_path: Path, *ranks: Asked) -> _Preset:
    """Programs whose rounds took 0.1 s a step, and the request for energy."""
    names = [Name.of(text) for text in ("A", "C")[: len(ranks)]]
    settings = config.load("cpu_smoke", [])
    plan = Plan(
        settings=[settings], names=names, world_size=2, rounds=1, jobs=1, cores_per_rank=1, timeout_s=1.0,
        keeps_going=False, logs=tmp_path,
    )  # fmt: skip
    preset = _Preset(plan, settings, tmp_path, lambda text: None)
    for entry, of_entry in zip(preset._entries, ranks, strict=True):
        entry.ranks, entry.row = of_entry, row(entry.row.name, 100.0)  # type: ignore[assignment]  # only `ask` is called
    preset._step_each(preset._power, preset._entries)
    return preset


def test_the_rank_with_the_lower_clock_stands_for_the_program(tmp_path: Path) -> None:
    slower = FOUND.model_copy(update={"mhz": 1400})
    ranks = Asked({"power": FOUND.model_dump()}, {"power": slower.model_dump()})
    preset = asked(tmp_path, ranks)
    assert (preset._entries[0].row.power, preset._why_no_power) == (slower, "")
    assert ranks.requests == [("power", 15)]  # of 0.1 s


def test_a_rank_without_a_counter_leaves_it_to_the_other(tmp_path: Path) -> None:
    preset = asked(tmp_path, Asked({"power": FOUND.model_dump()}, {"why_not": "no NVML"}))
    assert (preset._entries[0].row.power, preset._why_no_power) == (FOUND, "")


def test_ranks_without_counters_end_it_with_the_reason(tmp_path: Path) -> None:
    first, second = Asked({"why_not": "no NVML"}, {"why_not": "no NVML"}), Asked()
    preset = asked(tmp_path, first, second)
    assert preset._why_no_power.startswith("A:")
    assert second.requests == []


def test_the_table_has_joules_and_who_was_at_the_limit() -> None:
    below = FOUND.model_copy(update={"joules": 5.5, "at_limit": False})
    large = below.model_copy(update={"joules": 1209.431})
    rows = [row("A", 10.0, power=FOUND), row("C", 9.0, power=below), row("B", 9.5), row("eager", 9.5, power=large)]
    shown = [str(line) for line in lines(measured(rows), MACHINE, world_size=2)]
    at = shown[1].split().index("J")
    assert {line.split()[0]: line.split()[at] for line in shown[2:6]} == {
        "A": "6.980", "C": "5.500", "B": "-", "eager": "1209.431",
    }  # fmt: skip
    (line,) = [line for line in shown if "power limit" in line]
    limits, _, at_limit = line.partition(": ")
    assert re.findall(r"\d+ \w+", limits) == ["700 W", "1980 MHz"] and at_limit == "A 698 W 1545 MHz"


def test_the_table_says_why_there_are_none() -> None:
    shown = [str(one) for one in lines(measured([row("A", 10.0)], why_no_power="A: no NVML"), MACHINE, world_size=2)]
    assert sum("A: no NVML" in line for line in shown) == 1
    assert not any("power limit" in line for line in shown)
