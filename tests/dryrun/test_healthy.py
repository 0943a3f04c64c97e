"""Healthy programs of many kinds: the dry run raises no alarm, or says in one line that it needs `--arch`.

`python -m tests.dryrun.test_healthy` runs all of them on both meshes; the tests some of each kind.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.dryrun.test_dryrun import command_of, dryrun
from tests.forked import ROOT
from tpcompile.config import preset_paths
from tpcompile.evidence.rundir import RunDir

MESHES = ("tp=4", "dp=2,tp=2")
ON_META = {
    "plans": ("tensor_parallel", "sequence_parallel", "fully_sharded", "uneven", "dtensors"),
    "by_hand": ("megatron", "vocabulary_parallel", "experts"),
    "on_gpus": ("moved", "default_device", "autocast_around", "own_mesh", "seeded"),
    "compiled": (
        "autotuned", "with_options", "imported_compile", "custom_op", "float8", "dynamic", "marked", "checkpointed",
        "inference",
    ),
}  # fmt: skip
NEEDS_ARCH = {
    "on_gpus": ("by_index", "autocast", "chosen_by_capability", "streams", "in_the_region"),
    "compiled": ("own_kernel", "flex"),
}
QUICK = ("plans:tensor_parallel", "by_hand:megatron", "on_gpus:moved")
"""What runs without `slow`."""
SOME = (
    "plans:sequence_parallel", "plans:fully_sharded", "plans:uneven", "by_hand:experts", "on_gpus:own_mesh",
    "on_gpus:default_device", "compiled:custom_op", "compiled:dynamic",
)  # fmt: skip


def programs(found: dict[str, tuple[str, ...]]) -> list[str]:
    return [f"{module}:{name}" for module, names in found.items() for name in names]


def passes(folder: Path, mesh: str, program: str, *arguments: str) -> None:
    ended, verdict = dryrun(folder, "--mesh", mesh, *arguments, function=f"healthy.{program}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert verdict is not None
    assert not [one for one in verdict.divergences if one.is_red]


@pytest.mark.parametrize("program", QUICK)
def test_a_healthy_program_raises_no_alarm(program: str, tmp_path: Path) -> None:
    passes(tmp_path, MESHES[-1], program)


@pytest.mark.slow
@pytest.mark.parametrize("program", SOME)
def test_no_healthy_program_raises_an_alarm(program: str, tmp_path: Path) -> None:
    passes(tmp_path, MESHES[-1], program)


@pytest.mark.slow
def test_no_plan_of_transformers_raises_an_alarm(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    passes(tmp_path, "tp=2", "plans:transformers_plan", "--set", "family=Llama")


@pytest.mark.slow
def test_stages_of_a_pipeline_may_differ(tmp_path: Path) -> None:
    passes(tmp_path, "pp=2,tp=4", "by_hand:pipeline")


@pytest.mark.slow
def test_no_preset_raises_an_alarm(tmp_path: Path) -> None:
    passes(tmp_path, "tp=2", "presets:stack", "--set", f"preset={next(iter(preset_paths()))}")


@pytest.mark.parametrize("program", ["on_gpus:by_index", "on_gpus:streams", "compiled:own_kernel"])
def test_a_program_that_needs_a_gpu_is_refused_in_one_line(program: str, tmp_path: Path) -> None:
    if program.endswith("own_kernel") and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    ended, verdict = dryrun(tmp_path, "--world-size", "2", function=f"healthy.{program}")
    assert (ended.returncode, verdict) == (2, None), ended.stdout + ended.stderr
    (line,) = ended.stderr.strip().splitlines()
    assert "--arch sm_90" in line


def main() -> None:
    """Run every program, and print those that raise an alarm."""
    runs = [(mesh, program) for mesh in MESHES for program in programs(ON_META)]
    runs += [("pp=2,tp=4", "by_hand:pipeline")]
    with_settings = [("plans:transformers_plan", f"family={family}") for family in ("Llama", "Qwen3", "Mixtral")]
    with_settings += [("presets:stack", f"preset={preset}") for preset in preset_paths()]
    every = [(*run, ()) for run in runs] + [("tp=4", program, ("--set", text)) for program, text in with_settings]
    for mesh, program, settings in every:
        with TemporaryDirectory() as folder:
            command = command_of(Path(folder), "--mesh", mesh, *settings, function=f"healthy.{program}")
            ended = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
            verdict = RunDir(Path(folder) / "run").read_verdict()
            print(ended.returncode, mesh, program, *settings, verdict.summary if verdict else ended.stderr, flush=True)


if __name__ == "__main__":
    main()
