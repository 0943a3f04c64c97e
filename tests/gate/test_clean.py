"""A correct block stays green: presets, modes, one rank and more, every state of the Inductor cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.gate.runs import AOT, GateRun, by_id, compare_offline, run_gate, run_many, run_with_caches
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.records import CheckId, Layer, RankDigest, Status
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.replay import replay

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

JOBS: dict[str, dict[str, Any]] = {
    "llama_train": {"preset": "llama_smoke", "train": True},
    "all_modes": {"preset": "llama_smoke", "modes": ["A", "B", "C"]},
    "shared_kv_heads": {
        "preset": "llama_smoke",
        "train": True,
        "overrides": ["block.num_kv_heads=1", "block.qk_norm=full", "block.sequence_parallel=true"],
    },
    "every_option": {
        "preset": "wan21_smoke",
        "train": True,
        "overrides": [
            "block.masked=true",
            "block.causal=true",
            "block.sequence_parallel=true",
            "block.dropout=0.1",
            "block.uneven=pad",
            "block.num_heads=7",
            "block.num_kv_heads=7",
            "block.head_size=8",
            "block.ffn_dim=122",
        ],
    },
}
ON_ONE_RANK = ("llama_train", "all_modes")
CACHES = ("cold", "split")
BASELINES = forked.ROOT / "configs" / "fusion"
FEW_CALLS = "gate.steady_calls=3"
SAME_LENGTH = ("gate.resized_seq_len=16", FEW_CALLS)
"""A second compile, after a change of the length, costs as much as the first."""
RESIZED = "all_modes"
"""The job whose length changes: without gradients, in Llama style; test_fast_paths.py has Wan's, with gradients."""


def test_the_gate_on_cpus_is_green_where_torch_sees_gpus(tmp_path: Path) -> None:
    ended = forked.torchrun([forked.ROOT / "tests/gate/beside_gpus.py", tmp_path / "run"])
    verdict = RunDir(tmp_path / "run").read_verdict()
    assert verdict is not None, ended.stderr
    assert (verdict.exit_code, ended.returncode) == (0, 0), verdict.summary
    assert CheckId.SCHEDULE in {check.id for check in verdict.checks}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    jobs = {}
    for name, job in JOBS.items():
        length = (FEW_CALLS,) if name == RESIZED else SAME_LENGTH
        jobs[name] = {**job, "overrides": [*AOT, *length, *job.get("overrides", ())], "device": "cpu"}
    return run_many(tmp_path_factory.mktemp("two"), jobs)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    jobs = {name: {**JOBS[name], "overrides": [*AOT, *SAME_LENGTH], "device": "cpu"} for name in ON_ONE_RANK}
    return run_many(tmp_path_factory.mktemp("one"), jobs, nproc=1)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    """Inductor with Wan's block and training: empty caches, then the same filled, one of the two without its graphs.

    Rank 1 of the first run has a hash seed of its own; forked ranks have that of the process they come from.
    """
    folder = tmp_path_factory.mktemp("cached")
    caches = folder / "caches"
    length = [argument for override in SAME_LENGTH for argument in ("--set", override)]
    baseline = shutil.copy(BASELINES / f"cpu_smoke-torch{'.'.join(torch.__version__.split('.')[:2])}-cpu.json", folder)
    arguments = ["--train", *length, "--fusion-baseline", baseline]
    cold = run_with_caches(folder / "cold", caches, *arguments, hash_seed=11)
    # Its graphs only: what was compiled from C++ takes most of the time. AOTAutograd may have kept none.
    shutil.rmtree(caches / "1" / "fxgraph")
    shutil.rmtree(caches / "1" / "aotautograd", ignore_errors=True)
    return {"cold": cold, "split": run_with_caches(folder / "split", caches, *arguments)}


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_are_green(two_ranks: dict[str, GateRun], name: str) -> None:
    assert_green(two_ranks[name])
    assert two_ranks[name].judged.world_size == 2


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_one_rank_is_green(one_rank: dict[str, GateRun], name: str) -> None:
    assert_green(one_rank[name])


def test_a_run_leaves_signals_and_threads_as_they_were(two_ranks: dict[str, GateRun]) -> None:
    for run in two_ranks.values():
        for rank in (0, 1):
            found = json.loads((run.run_dir / f"process_{rank}.json").read_text())
            assert found["before"] == found["after"]
            assert found["after"]["threads"] == []


@pytest.mark.parametrize("state", CACHES)
def test_inductor_is_green_with_any_cache_and_hash_seed(cached: dict[str, GateRun], state: str) -> None:
    assert_green(cached[state])
    assert status_of(cached[state], Layer.KERNELS) == Status.PASS
    (kernels,) = [check for check in cached[state].judged.checks if check.id == CheckId.FUSION]
    assert kernels.status == Status.PASS


def test_split_cache_is_a_hit_on_one_rank_and_a_miss_on_the_other(cached: dict[str, GateRun]) -> None:
    assert [outcomes(cached["split"], rank) for rank in (0, 1)] == [{"hit"}, {"miss"}]
    assert [outcomes(cached["cold"], rank) for rank in (0, 1)] == [{"miss"}, {"miss"}]


def test_digests_do_not_depend_on_the_cache_or_the_hash_seed(cached: dict[str, GateRun]) -> None:
    verdicts = [cached[state].judged for state in CACHES]
    assert all(v.domains == verdicts[0].domains for v in verdicts)
    layers = [[c.layers for c in digest(cached[state], rank).compiles] for state in CACHES for rank in (0, 1)]
    assert all(one == layers[0] for one in layers)


def test_all_modes_are_judged_in_one_run(two_ranks: dict[str, GateRun]) -> None:
    verdict = two_ranks["all_modes"].judged
    assert {c.mode for c in verdict.checks} == {"A", "B", "C"}
    assert sorted(verdict.timings_ms) == ["A", "B", "C"]


def test_green_verdict_is_the_same_when_it_is_replayed_from_the_records(two_ranks: dict[str, GateRun]) -> None:
    for run in two_ranks.values():
        assert replay(RunDir(run.run_dir)) == run.judged


def test_compare_of_a_green_run_ends_with_0_and_needs_no_torch(two_ranks: dict[str, GateRun]) -> None:
    code, text = compare_offline(two_ranks["all_modes"].run_dir)
    assert code == 0, text
    assert "PASS (exit 0)" in text


def test_eight_ranks_are_green_on_the_cores_there_are(tmp_path: Path) -> None:
    # Eight compiles on few cores: without AOTAutograd they take half the time.
    overrides = ("compile.backend=eager", "block.num_layers=1", *SAME_LENGTH)
    settings = [argument for override in overrides for argument in ("--set", override)]
    run = run_gate(tmp_path / "run", *settings, nproc=8)
    assert_green(run)
    assert run.judged.domains == {"tp": (tuple(range(8)),)}
    assert run.left_running == ()


def assert_green(run: GateRun) -> None:
    """Exit 0, every check passed or skipped, no divergence but that of a cache."""
    assert (run.judged.exit_code, run.exit_code) == (0, 0), f"{run.judged.summary}\n{run.stderr}"
    assert not run.failed()
    assert {d.cause for d in run.judged.divergences} <= {Cause.CACHE_SPLIT}


def status_of(run: GateRun, key: CheckId | Layer) -> Status:
    """Outcome of one check."""
    return by_id(run.judged.checks)[key].status


def digest(run: GateRun, rank: int) -> RankDigest:
    """The digest that rank published."""
    return digest_rank(RunDir(run.run_dir).read_records()[rank])


def outcomes(run: GateRun, rank: int) -> set[str]:
    """`hit`, `miss` or `bypass` of every graph that rank looked up in Inductor's cache."""
    found = {text for c in RunDir(run.run_dir).read_records()[rank].compiles for text in c.cache}
    return {text.rpartition("_")[2] for text in found if text.startswith("fx_graph_cache")}
