"""tpcompile/fusion/win: measurements -> advice, each cause with a control, and the command on small programs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ROOT, Ended, run_python
from tpcompile.fusion.win.decide import decide
from tpcompile.fusion.win.mode_records import Cause, Measured, Side

REQUEST = {"settings": [], "mode": "default", "device": "cpu", "rounds": 10}


def mode(name: str = "default", *, gain: float = 1.0, **changed: Any) -> Measured:
    """A mode in which nothing is wrong; `gain` is its speed-up."""
    sides = {
        "eager": {"step_ms": (1.0,) * 8, "launches": 10, "library_share": 0.2, "busy_share": 0.9},
        "compiled": {
            "step_ms": (1.0 / gain,) * 8,
            "launches": 4,
            "library_share": 0.2,
            "busy_share": 0.9,
            "num_replays": None,
        },
    }
    sides["compiled"] |= {key: changed.pop(key) for key in list(changed) if key in sides["compiled"]}
    fields = {
        "error_ratio": 1.0, "first_call_s": 1.0, "cached_s": None, "num_cold_calls": 0, "num_graphs": 1,
        "num_regions": 1, "num_breaks": 0, "num_recompiles": 0, "num_rerecorded": 0, "num_not_recorded": 0,
    }  # fmt: skip
    return Measured(mode=name, **{side: Side(**value) for side, value in sides.items()}, **(fields | changed))


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"num_recompiles": 1}, Cause.RECOMPILES),
        ({"num_breaks": 1}, Cause.BREAKS),
        ({"num_regions": 0}, Cause.BREAKS),
        ({"num_rerecorded": 2}, Cause.SHAPES),
        ({"busy_share": 0.3}, Cause.LAUNCHES),
        ({"library_share": 0.95}, Cause.LIBRARY),
        ({"launches": 10}, Cause.UNCHANGED),
        ({"error_ratio": 40.0}, Cause.WRONG),
        ({"error_ratio": float("inf")}, Cause.WRONG),
        ({}, Cause.UNKNOWN),
    ],
)
def test_each_cause_is_named_and_without_it_there_is_none(changed: dict[str, Any], cause: Cause) -> None:
    advice = decide([mode(**changed)])
    assert (advice.use, advice.cause) == ("eager", cause)
    assert cause in advice.says


@pytest.mark.parametrize("changed", [{"num_breaks": 1}, {"library_share": 0.95}, {"launches": 10}, {"busy_share": 0.3}])
def test_a_program_that_is_faster_has_no_cause(changed: dict[str, Any]) -> None:
    assert decide([mode(gain=1.5, **changed)]).use == "default"


@pytest.mark.parametrize(
    ("gains", "use"),
    [
        ((1.5, 1.4, 1.45), "default"),
        ((1.5, 1.52, 1.52), "default"),
        ((1.5, 2.0, 2.01), "reduce-overhead"),
        ((1.5, 1.5, 2.0), "max-autotune"),
        ((1.0, 1.01, 1.02), "eager"),
        ((0.8, 0.9, 0.7), "eager"),
    ],
)
def test_a_mode_that_costs_more_must_be_faster_beyond_noise(gains: tuple[float, ...], use: str) -> None:
    names = ("default", "reduce-overhead", "max-autotune")
    assert decide([mode(name, gain=gain) for name, gain in zip(names, gains, strict=True)]).use == use


def test_a_mode_with_wrong_outputs_is_not_advised_however_fast() -> None:
    assert decide([mode(gain=1.5), mode("max-autotune", gain=9.0, error_ratio=30.0)]).use == "default"


def test_what_is_faster_and_was_not_compared_is_no_win() -> None:
    assert decide([mode(gain=1.5)]).is_win
    advice = decide([mode(gain=1.5, error_ratio=None)])
    assert (advice.use, advice.cause, advice.is_win) == ("default", Cause.NOT_COMPARED, False)
    assert advice.says.startswith("default: 1.50x of eager; ")


def test_a_module_in_float64_with_its_tensors_as_parameters_can_be_compared() -> None:
    """What is said of a program whose outputs were not compared."""
    import torch
    from torch import nn

    from tpcompile import Target
    from tpcompile.fusion.win.measure_mode import Program, _exact

    weight = torch.ones(4, 4)
    for program, is_compared in ((lambda x: x @ weight, False), (nn.Linear(4, 4), True)):
        target = Target(program=program, inputs=(torch.ones(2, 4),))
        assert (_exact(Program(target, torch.device("cpu"), "it")).first is not None) == is_compared


def test_a_cause_of_the_program_is_looked_for_in_every_mode() -> None:
    """Only some have CUDA graphs."""
    assert decide([mode(), mode("reduce-overhead", num_rerecorded=30)]).cause is Cause.SHAPES
    assert decide([mode(), mode("reduce-overhead", busy_share=0.1)]).cause is Cause.UNKNOWN


@pytest.mark.parametrize(
    ("name", "changed", "cause"),
    [
        ("reduce-overhead", {"num_replays": 0}, Cause.SHAPES),
        ("max-autotune", {"num_replays": 0}, Cause.SHAPES),
        ("reduce-overhead", {"num_replays": 1}, Cause.UNKNOWN),
        ("reduce-overhead", {"num_replays": 0, "num_not_recorded": 1}, Cause.UNKNOWN),
        ("default", {"num_replays": 0}, Cause.UNKNOWN),
    ],
)
def test_graphs_that_are_never_replayed_see_a_new_shape_in_every_call(
    name: str, changed: dict[str, Any], cause: Cause
) -> None:
    assert decide([mode(), mode(name, **changed)]).cause is cause


NOISY = (0.3, 0.6, 1.2, 2.4) * 2
"""Milliseconds beside 1.0 of eager: 1.25x in the median, and no gain beyond the noise."""


@pytest.mark.parametrize(
    ("step_ms", "cause"), [(NOISY, Cause.NOISE), ((1.0,) * 8, Cause.UNCHANGED), ((1.3,) * 8, Cause.UNCHANGED)]
)
def test_a_gain_within_noise_is_no_matter_of_kernels(step_ms: tuple[float, ...], cause: Cause) -> None:
    advice = decide([mode(launches=10, step_ms=step_ms)])
    assert (advice.use, advice.cause) == ("eager", cause)


def test_the_noise_stands_beside_the_speed_up_that_is_no_win() -> None:
    assert "(1.25x +-96% in default)" in decide([mode(step_ms=NOISY)]).says


def test_a_mode_that_was_measured_and_did_not_win_is_not_advised() -> None:
    waiting = mode(busy_share=0.3)
    assert "use reduce-overhead" in decide([waiting]).says
    advice = decide([waiting, mode("reduce-overhead", gain=0.9)])
    assert advice.cause is Cause.LAUNCHES
    assert re.search("CUDA graphs .*not help", advice.says)
    assert "reduce-overhead" not in advice.says


def test_a_wrong_mode_is_the_cause_where_no_other_wins() -> None:
    assert decide([mode(error_ratio=9.0), mode("reduce-overhead")]).cause is Cause.WRONG


def measured(target: str, folder: Path, mode: str = "default", device: str = "cpu") -> Measured:
    """What the process of one mode measures, forked with torch."""
    asked, out = folder / "request.json", folder / "out.json"
    asked.write_text(json.dumps(REQUEST | {"target": target, "mode": mode, "device": device, "out": str(out)}))
    ended = measuring(asked)
    assert ended.returncode == 0, ended.stderr
    return Measured.model_validate_json(out.read_text())


def in_equal_time(found: Measured) -> Measured:
    """`found` as on a machine where no side is faster: what remains are its counts, shares and outputs."""
    equal = {"step_ms": (1.0,) * len(found.eager.step_ms)}
    sides = {"eager": found.eager, "compiled": found.compiled}
    return found.model_copy(update={name: side.model_copy(update=equal) for name, side in sides.items()})


def measuring(asked: Path) -> Ended:
    """The process of one mode."""
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(asked.parent / "cache")}
    return run_python(["-m", "tests.fusion.vectorised", asked], environ=environ)


def test_noise_is_shown_as_a_part_of_the_speed_up() -> None:
    from tpcompile.fusion.win.decide import lines

    noisy = mode(gain=2.0, step_ms=(0.25, 0.5, 0.5, 1.0) * 2)
    shown = [str(line) for line in lines([noisy], decide([noisy]))]
    assert "2.00x +-56%" in shown[1]


def test_cuda_graphs_are_told_that_a_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a forward with parameters and no backward is recorded anew in every call."""
    import torch

    from tpcompile import Target
    from tpcompile.fusion.win.measure_mode import Program

    seen: list[str] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: seen.append("step"))
    program = Program(Target(program=len, inputs=()), torch.device("cpu"), "it")
    step = program.step(lambda: seen.append("program"))
    step()
    step()
    assert seen == ["step", "program"] * 2


@pytest.mark.slow
def test_what_the_program_raises_is_shown_and_no_bug_of_ours(tmp_path: Path) -> None:
    asked = tmp_path / "request.json"
    asked.write_text(json.dumps(REQUEST | {"target": "tests.fusion.wins:raising", "out": str(tmp_path / "out.json")}))
    ended = measuring(asked)
    assert ended.returncode == 2
    assert "no such op here" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: tests.fusion.wins:raising raised ")


@pytest.mark.slow
def test_what_the_program_raises_ends_a_recording_as_well() -> None:
    ended = run_python(["-m", "tpcompile.fusion", "record", "tests.fusion.wins:raising"])
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("error: tests.fusion.wins:raising raised ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("repro.fusion.modes:broken", Cause.BREAKS),
        ("repro.fusion.modes:counting", Cause.RECOMPILES),
        ("repro.fusion.modes:library", Cause.LIBRARY),
        ("tests.fusion.wins:wrong", Cause.WRONG),
    ],
)
def test_programs_without_a_win_have_their_cause(program: str, cause: Cause, tmp_path: Path) -> None:
    found = measured(program, tmp_path)
    assert decide([in_equal_time(found)]).cause is cause, found


@pytest.mark.slow
@pytest.mark.parametrize(("program", "launches"), [("unbroken", (4, 1)), ("counting_in_tensor", (6, 2))])
def test_repaired_programs_are_one_graph_and_fused(program: str, launches: tuple[int, int], tmp_path: Path) -> None:
    found = measured(f"repro.fusion.modes:{program}", tmp_path)
    assert (found.num_regions, found.num_breaks, found.num_recompiles) == (1, 0, 0)
    assert (found.eager.launches, found.compiled.launches) == launches


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("program", "mode", "cause"),
    [
        ("lengths", "reduce-overhead", Cause.SHAPES),
        ("padded_lengths", "reduce-overhead", None),
        ("small", "default", Cause.LAUNCHES),
        ("small", "reduce-overhead", None),
        ("library", "reduce-overhead", Cause.LIBRARY),
        ("pointwise", "reduce-overhead", None),
    ],
)
def test_on_a_gpu_each_cause_is_named_and_its_repair_wins(
    program: str, mode: str, cause: Cause | None, tmp_path: Path
) -> None:
    """Other tests on the machine slow a program down: where the repair wins, none is left but those of the clock."""
    found = measured(f"repro.fusion.modes:{program}", tmp_path, mode, "cuda")
    if cause is None:
        assert decide([in_equal_time(found)]).cause in (Cause.LAUNCHES, Cause.UNKNOWN), found
    else:
        assert decide([found]).cause is cause, found


@pytest.mark.slow
def test_thirty_passes_over_memory_become_one_and_the_rounds_are_timed(tmp_path: Path) -> None:
    """No cause but the clock is left: a busy machine's clock decides nothing here."""
    found = measured("repro.fusion.modes:pointwise", tmp_path)
    assert (found.eager.launches, found.compiled.launches, found.num_regions) == (30, 1, 1)
    assert len(found.eager.step_ms) == len(found.compiled.step_ms) == REQUEST["rounds"]
    assert min(found.eager.step_ms + found.compiled.step_ms) > 0
    assert decide([in_equal_time(found)]).cause is Cause.UNKNOWN


def verify(program: str) -> Ended:
    """The command; its processes are forked with torch."""
    command = ["-m", "tpcompile", "verify-win", f"tests.fusion.wins:{program}", "--mode", "default"]
    return run_python([*command, "--no-cached", "--device", "cpu", "--rounds", "10"], cwd=ROOT)


@pytest.mark.slow
def test_outputs_that_are_wrong_in_a_later_call_are_found_by_the_command() -> None:
    found = verify("wrong_later")
    assert found.returncode == 1, found.stderr
    assert found.stdout.splitlines()[-1].startswith(f"eager: {Cause.WRONG}")


@pytest.mark.slow
def test_a_module_that_keeps_its_process_group_is_measured(tmp_path: Path) -> None:
    found = measured("tests.fusion.wins:in_group", tmp_path)
    assert (found.num_regions, found.num_breaks) == (1, 0)
    assert found.error_ratio is not None


@pytest.mark.slow
def test_what_cannot_be_copied_is_a_usage_error_that_names_it(tmp_path: Path) -> None:
    asked = tmp_path / "request.json"
    asked.write_text(json.dumps(REQUEST | {"target": "tests.fusion.wins:locked", "out": str(tmp_path / "out.json")}))
    ended = measuring(asked)
    assert ended.returncode == 2, ended.stderr
    assert "_thread.lock" in ended.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_target_that_is_not_there_is_a_usage_error() -> None:
    assert verify("missing").returncode == 2
