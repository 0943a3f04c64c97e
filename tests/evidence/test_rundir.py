from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from tpcompile.errors import ConfigError, PreflightError
from tpcompile.evidence import rundir as rundir_module
from tpcompile.evidence.records import SCHEMA_VERSION, RankRecord, Status, Verdict
from tpcompile.evidence.rundir import RankStatus, RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A fresh run directory."""
    return RunDir.create(tmp_path / "run")


def verdict(summary: str = "ok") -> Verdict:
    """A green verdict."""
    return Verdict(status=Status.PASS, exit_code=0, world_size=2, summary=summary)


def status(rank: int = 0, phase: str = "C/first") -> RankStatus:
    """A rank that runs."""
    return RankStatus(rank=rank, world_size=2, pid=1, host="h", phase=phase, state="running")


def files(run: RunDir) -> list[str]:
    """Every file in the run directory, hidden ones too."""
    return sorted(str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file())


def test_what_is_written_is_read_back(run: RunDir) -> None:
    record = RankRecord(rank=1, world_size=2, facts={"error": 0.5})
    run.write_record(record)
    run.write_status(status())
    run.write_verdict(verdict())
    assert run.read_records() == [record]
    assert run.read_statuses() == [status()]
    assert run.read_verdict() == verdict()


def test_an_empty_run_has_no_verdict_and_no_ranks(run: RunDir) -> None:
    assert (run.read_verdict(), run.read_records(), run.read_statuses(), run.read_run()) == (None, [], [], {})


def test_ranks_come_back_in_numeric_order(run: RunDir) -> None:
    for rank in (10, 2, 0):
        run.write_status(status(rank))
    assert [s.rank for s in run.read_statuses()] == [0, 2, 10]


def test_no_temporary_file_is_left(run: RunDir) -> None:
    run.write_status(status())
    run.write_status(status(phase="C/steady"))
    run.write_verdict(verdict())
    run.write_verdict(verdict("second"))
    assert files(run) == ["rank_0/status.json", "verdict.json"]


def test_a_write_that_fails_leaves_the_old_file_whole(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_status(status())

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(rundir_module.os, "replace", fail)
    with pytest.raises(PreflightError, match="disk full"):
        run.write_status(status(phase="later"))
    assert run.read_statuses() == [status()]


def test_the_first_verdict_wins(run: RunDir) -> None:
    assert run.write_verdict(verdict("first"))
    assert not run.write_verdict(verdict("second"))
    found = run.read_verdict()
    assert found is not None
    assert found.summary == "first"


def _race(path: str, rank: int, barrier: Barrier) -> None:
    barrier.wait()
    os._exit(int(RunDir(path).write_verdict(verdict(f"rank {rank}"))))


def test_of_many_writers_exactly_one_wins(run: RunDir) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    writers = [context.Process(target=_race, args=(str(run.path), rank, barrier)) for rank in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    won = [rank for rank, writer in enumerate(writers) if writer.exitcode == 1]
    found = run.read_verdict()
    assert found is not None
    assert [found.summary] == [f"rank {rank}" for rank in won]


def test_json_is_sorted_and_stable(run: RunDir) -> None:
    run.write_record(RankRecord(rank=0, world_size=1, facts={"b": 1, "a": 2}))
    run.write_record(RankRecord(rank=1, world_size=1, facts={"a": 2, "b": 1}))
    one, two = ((run.path / f"rank_{n}" / "record.json").read_text() for n in (0, 1))
    assert one == two.replace('"rank": 1', '"rank": 0')


def test_a_different_schema_is_refused_with_both_versions(run: RunDir) -> None:
    data = json.loads(verdict().to_json()) | {"schema_version": 99}
    run.write_text("verdict.json", json.dumps(data))
    with pytest.raises(ConfigError, match=rf"\b99\b.* {SCHEMA_VERSION}\b"):
        run.read_verdict()


@pytest.mark.parametrize(
    "text", [f'{{"schema_version": {SCHEMA_VERSION}}}', f'{{"schema_version": {SCHEMA_VERSION}, "typo": 2}}']
)
def test_a_file_with_wrong_keys_is_called_damaged(run: RunDir, text: str) -> None:
    run.write_text("verdict.json", text)
    with pytest.raises(ConfigError, match=r"verdict\.json"):
        run.read_verdict()


def test_a_missing_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nope"):
        RunDir.open(tmp_path / "nope")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match=r"file/run.*--run-dir"):
        RunDir.create(tmp_path / "file" / "run")


def test_runs_that_begin_in_the_same_second_have_a_folder_each() -> None:
    names = {rundir_module.new_name("check") for _ in range(20)}
    assert len(names) > 15  # four digits
    assert all(re.fullmatch(r"runs/\d{8}T\d{6}-check-[0-9a-f]{4}", name) for name in names)


def free_name(path: Path | str) -> Path:
    """The first that no run has taken."""
    return rundir_module.numbered(path, rundir_module.free_number(path))


def test_a_name_that_a_run_has_taken_gets_a_number(tmp_path: Path) -> None:
    assert free_name(tmp_path / "mine") == tmp_path / "mine"
    RunDir.create(tmp_path / "mine").write_verdict(verdict())
    RunDir.create(tmp_path / "mine-2").write_text("rank_1/traceback.txt", "of a run that was killed")
    for name in (tmp_path / "mine", f"{tmp_path}/mine/", tmp_path / "mine-2" / ".." / "mine"):
        assert free_name(name).resolve() == tmp_path / "mine-3"


def test_the_folder_one_is_in_gets_a_name_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunDir.create(tmp_path / "mine").write_verdict(verdict())
    monkeypatch.chdir(tmp_path / "mine")
    assert free_name(".") == tmp_path / "mine-2"


def test_a_folder_that_cannot_be_looked_at_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="File name"):
        free_name(tmp_path / ("a" * 300))


def test_the_folders_of_two_nodes_are_read_as_one_run(tmp_path: Path) -> None:
    first, second, again = (RunDir.create(tmp_path / name) for name in "abc")
    for rank, run in ((0, first), (1, second), (0, again)):
        run.write_record(RankRecord(rank=rank, world_size=2, job="one"))
    assert [record.rank for record in first.read_records(beside=[second])] == [0, 1]
    with pytest.raises(ConfigError, match=r"two records .*rank 0: "):
        first.read_records(beside=[second, again])
    second.write_record(RankRecord(rank=1, world_size=2, job="other"))
    with pytest.raises(ConfigError, match="'one' and 'other'"):
        first.read_records(beside=[second])
