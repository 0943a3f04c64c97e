"""Ranks with different kernels, and kernels beyond a baseline: the pair, the reason, the knob and the user's line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest import mock

import pytest

from tests.gate.runs import GateRun, compare_offline, run_many
from tests.gate.test_target import line_of
from tpcompile.errors import ExitCode
from tpcompile.evidence.records import CheckId, Layer, Status
from tpcompile.evidence.records.causes import Cause
from tpcompile.fusion import baseline as baselines
from tpcompile.fusion import manifest as manifests
from tpcompile.fusion.diff import Change, diff
from tpcompile.gate.fusion import FusionCheck

pytestmark = pytest.mark.timeout(300)
LINE = line_of("the first kernel", Path(__file__).with_name("fused.py"))
SPLIT = "size limit: the kernel would hold too many nodes; try: config.max_fusion_size (64)"


def gates(folder: Path, jobs: dict[str, list[str]]) -> dict[str, GateRun]:
    """Name -> settings; each rank has compiled nothing before the first of them."""
    target = {"target": "tests.gate.fused:build", "device": "cpu"}
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    return run_many(folder, {name: {**target, "overrides": sets} for name, sets in jobs.items()}, environ=environ)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    jobs = {"equal": ["limit=64"], "one rank": ["limit=1", "rank=1"], "split": ["limit=1"]}
    return gates(tmp_path_factory.mktemp("ranks"), jobs)


def test_a_rank_whose_kernels_are_split_is_named_with_the_setting_the_pair_the_reason_and_the_line(
    runs: dict[str, GateRun],
) -> None:
    verdict = runs["one rank"].judged
    assert verdict.lead and "_inductor.config.max_fusion_size: 1" in verdict.lead.says
    (kernels,) = [found for found in verdict.divergences if found.layer is Layer.KERNELS and found.is_red]
    assert SPLIT in kernels.title
    assert kernels.line and (Path(kernels.line.file).name, kernels.line.line) == ("fused.py", LINE)


def test_the_manifests_of_both_ranks_tell_the_same(runs: dict[str, GateRun]) -> None:
    found = [manifests.read(runs["one rank"].run_dir / f"rank_{rank}" / "manifest.json") for rank in (0, 1)]
    assert diff(*found).change is Change.FUSION
    assert diff(found[0], manifests.read(runs["equal"].run_dir / "rank_1" / "manifest.json")).change is Change.NONE


@pytest.mark.parametrize("name", ["equal", "split"])
def test_ranks_with_the_same_kernels_are_green(name: str, runs: dict[str, GateRun]) -> None:
    assert runs[name].exit_code == 0, runs[name].judged.summary
    assert not [check for check in runs[name].judged.checks if check.id is CheckId.FUSION]


def limit_of(run: GateRun, path: Path) -> str:
    """Make its kernels a baseline; the setting that uses it."""
    baselines.write(baselines.baseline_of(manifests.read(run.run_dir / "rank_0" / "manifest.json")), path)
    return f"gate.fusion_baseline={path}"


@pytest.fixture(scope="module")
def limited(runs: dict[str, GateRun], tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    folder = tmp_path_factory.mktemp("limited")
    good, many = limit_of(runs["equal"], folder / "good.json"), limit_of(runs["split"], folder / "many.json")
    (folder / "other.json").write_text((folder / "good.json").read_text().replace('"cpu"', '"sm_90"'))
    jobs = {
        "as it was": ["limit=64", good],
        "worse": ["limit=1", good],
        "better": ["limit=64", many],
        "other": ["limit=64", f"gate.fusion_baseline={folder / 'other.json'}"],
        "not there": ["limit=64", f"gate.fusion_baseline={folder / 'nowhere.json'}"],
        "not lowered": ["limit=64", good, "compile.backend=aot_eager"],
    }
    return gates(folder, jobs)


def test_more_kernels_than_the_baseline_are_red_with_the_reason_and_the_line(limited: dict[str, GateRun]) -> None:
    run = limited["worse"]
    (check,) = run.failed().values()
    assert (run.exit_code, check.id, check.cause) == (ExitCode.FAIL, CheckId.FUSION, Cause.FUSION_REGRESSED)
    assert SPLIT in check.observed
    assert check.line and (Path(check.line.file).name, check.line.line) == ("fused.py", LINE)
    code, said = compare_offline(run.run_dir)
    assert (code, Cause.FUSION_REGRESSED.value in said) == (1, True)


def test_the_same_kernels_are_green_and_the_baseline_stays(limited: dict[str, GateRun]) -> None:
    run = limited["as it was"]
    (check,) = [check for check in run.judged.checks if check.id is CheckId.FUSION]
    assert (run.exit_code, check.status) == (0, Status.PASS)


def test_what_has_improved_leaves_the_baseline(limited: dict[str, GateRun]) -> None:
    run = limited["better"]
    (check,) = [check for check in run.judged.checks if check.id is CheckId.FUSION]
    assert run.exit_code == 0 and "many.json" in check.observed
    folder = run.run_dir.parent
    (good,), (tight,) = (baselines.read(folder / name).graphs for name in ("good.json", "many.json"))
    assert (tight.launches, tight.bytes) == (good.launches, good.bytes)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other", r"other.json is for torch \S+ on sm_90, and this is torch \S+ on cpu; make one for this build"),
        ("not there", "there is no .*nowhere.json; `tpcompile fusion baseline` writes one"),
        ("not lowered", "--fusion-baseline needs compile.backend=inductor, and mode C, all or a target"),
    ],
)
def test_a_baseline_that_cannot_be_used_is_one_line(name: str, says: str, limited: dict[str, GateRun]) -> None:
    assert limited[name].exit_code == ExitCode.USAGE
    assert re.search(says, limited[name].judged.summary)


def test_kernels_that_cannot_be_read_are_a_finding_and_no_crash() -> None:
    session = mock.Mock(manifest=mock.Mock(side_effect=KeyError("renamed")))
    baseline = baselines.Baseline(torch="2.13.0", device="cpu", graphs=())
    outcome = FusionCheck(("C",), Path("fusion.json"), baseline).outcome(session)
    assert outcome is not None
    assert "KeyError: 'renamed'" in outcome.why_not
    FusionCheck(("C",)).keep(session, mock.Mock(), rank=0)  # the verdict does without
