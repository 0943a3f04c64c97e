"""Ranks that differ are traced again for the line at which they parted, and nothing is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dryrun.test_dryrun import command_of
from tests.evidence import samples
from tests.forked import ROOT
from tpcompile.dryrun import branch
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.verdict import agree_rules, conclude
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.replay import fetch_from


def traced_again(folder: Path, does: str) -> Verdict:
    """Of four ranks, one has a smaller batch, and `does` that when it is traced again."""
    (folder / "tmp").mkdir(mode=0o700)
    settings = ("--set", "fault=shape", "--set", "odd=2", "--set", f"again={does}", "--set", f"folder={folder}")
    command = command_of(folder, "--mesh", "tp=4", *settings, function="targets:build_again")
    # A Python of its own looks up the temporary folder anew.
    environ = {**os.environ, "TMPDIR": str(folder / "tmp")}
    ended = subprocess.run(
        [sys.executable, *command], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert (folder / "again").exists()
    (rings,) = (folder / "tmp").glob("tpcompile-*/rings")
    assert list(rings.iterdir()) == []
    verdict = RunDir(folder / "run").read_verdict()
    assert verdict is not None
    return verdict


def test_a_rank_that_is_traced_again_leaves_its_lines_and_no_file(tmp_path: Path) -> None:
    lead = traced_again(tmp_path, "").lead
    assert lead is not None and lead.line is not None and lead.parted is not None
    assert (lead.ranks, lead.line.code[-14:]) == ((2,), "# fault: shape")


def test_what_was_found_stands_where_tracing_again_is_stopped(tmp_path: Path) -> None:
    lead = traced_again(tmp_path, "SIGTERM").lead
    assert lead is not None
    assert (lead.ranks, lead.parted) == ((2,), None)


def test_a_rank_that_dies_when_it_is_traced_again_leaves_no_file_either(tmp_path: Path) -> None:
    lead = traced_again(tmp_path, "killed").lead
    assert lead is not None
    assert lead.ranks == (2,)


RANKS = {
    (): [],
    (3,): [1, 2, 3],
    (0,): [0, 1, 2],
    (2, 3): [0, 1, 2],
    (0, 1, 2, 3): [],
}
"""Odd ranks -> those that are traced again: one of the odd, and its nearest peers, the first rank only among few."""


@pytest.mark.parametrize("odd", RANKS)
def test_one_odd_rank_is_traced_again_with_its_nearest_peers(odd: tuple[int, ...]) -> None:
    records = []
    for rank in range(4):
        node = samples.call("mul", "%0", "3" if rank in odd else "2")
        records.append(samples.record(rank, samples.compiled(node), world_size=4))
    digests = [digest_rank(record) for record in records]
    verdict = conclude(agree_rules(timeout_s=1), digests, fetch_from(records), world_size=4)
    assert verdict.exit_code == (1 if 0 < len(odd) < 4 else 0)
    assert branch.some_of_both_sides(verdict) == RANKS[odd]
