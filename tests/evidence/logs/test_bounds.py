"""Sizes that a job cannot have, packed and linked logs, names of any length: refused or read, in bounded work."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.evidence.logs.test_diagnose import JOBS, LOG, check
from tests.evidence.text.test_linear import limited_cpu
from tpcompile.errors import ConfigError
from tpcompile.evidence.logs import files
from tpcompile.evidence.logs.diagnose import LEFT_OUT, Question, diagnose
from tpcompile.evidence.logs.domains import parse_mesh
from tpcompile.evidence.logs.files import find_logs
from tpcompile.evidence.records import CheckId, Verdict
from tpcompile.evidence.records.bounds import MAX_RANKS
from tpcompile.report import screen

LONG = "long_name_" * 30_000
NAME = "dedicated_log_torch_trace_rank_{}_x.log"


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    """A copy of a job whose ranks agree."""
    return Path(shutil.copytree(JOBS / "cold_shared", tmp_path / "healthy"))


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """A copy of the stride job."""
    return Path(shutil.copytree(JOBS / "stride", tmp_path / "faulty"))


def packed(folder: Path, rank: int) -> Path:
    """The log of a rank, packed in place of the plain one."""
    plain = folder / LOG.format(rank)
    path = plain.with_name(f"{plain.name}.gz")
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return path


def printed(verdict: Verdict, folder: Path, *, is_terminal: bool) -> list[str]:
    """The lines that `tpcompile diagnose` prints."""
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=is_terminal, color_system=None)
    screen.render(verdict, console, command="diagnose", folder=folder)
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ("tp=999999999999999999999", "an axis has 21 digits"),
        ("tp=" + "9" * 5000, "an axis has 5000 digits"),
        ("dp=99999,tp=99999", "it has 9,999,800,001 ranks"),
        (f"tp={MAX_RANKS + 1}", "it has 131,073 ranks"),
        (",".join(f"a{n}=1" for n in range(10_000)), "it has 10000 axes"),
        ("a" * 300_000, "write it as dp=2,tp=4"),
        ("tp=\u00b2", "write it as dp=2,tp=4"),
        ("tp=0", "write it as dp=2,tp=4"),
    ],
)
def test_a_mesh_that_no_job_has_is_one_line(mesh: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_mesh(mesh, "tp")
    assert says in str(error.value) and len(str(error.value)) < 300


def test_the_largest_mesh_is_read() -> None:
    assert parse_mesh(f"dp=2,tp=00{MAX_RANKS // 2}", "tp").world_size == MAX_RANKS


@pytest.mark.parametrize("number", [str(MAX_RANKS), "999999", "9" * 5000])
def test_a_number_that_no_rank_has_is_left_out_with_its_name(healthy: Path, number: str) -> None:
    name = f"dedicated_log_torch_trace_rank_{number}.log"
    if len(name) < 250:
        shutil.copy(healthy / LOG.format(1), healthy / name)
        verdict = diagnose([healthy])
        assert (verdict.exit_code, verdict.world_size) == (0, 2)
        assert name in check(verdict, LEFT_OUT).details[0]


def test_the_lost_ranks_of_a_large_world_are_one_line(healthy: Path, tmp_path: Path) -> None:
    (healthy / LOG.format(1)).rename(healthy / LOG.format(MAX_RANKS - 1))
    with limited_cpu(20):
        verdict = diagnose([healthy], Question(world_size=MAX_RANKS))
    assert verdict.exit_code == 6
    details = check(verdict, CheckId.LOGS_COMPLETE.text).details
    assert len(details) == 1 and details[0].startswith(f"ranks 1-{MAX_RANKS - 2} ")
    lines = printed(verdict, tmp_path / "out", is_terminal=False)
    assert max(map(len, lines)) < 1000


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_packed_log_is_read_like_a_plain_one(faulty: Path, ranks: tuple[int, ...]) -> None:
    plain = diagnose([faulty])
    for rank in ranks:
        packed(faulty, rank)
    assert diagnose([faulty]) == plain


@pytest.mark.parametrize("kept", [0, 10, 2000])
def test_a_packed_log_that_is_cut_is_no_pass(healthy: Path, kept: int) -> None:
    path = packed(healthy, 1)
    path.write_bytes(path.read_bytes()[:kept])
    assert diagnose([healthy]).exit_code == 6


def test_a_packed_log_that_is_cut_behind_its_last_record_is_no_pass(healthy: Path) -> None:
    path = packed(healthy, 1)
    path.write_bytes(path.read_bytes()[:-4])  # of its checksum and length
    assert diagnose([healthy]).exit_code == 6


def test_a_packed_log_that_is_none_is_no_pass(healthy: Path) -> None:
    path = packed(healthy, 1)
    path.write_bytes(b"\x00" * 1000)
    assert diagnose([healthy]).exit_code == 6


def test_a_packed_log_that_unpacks_without_end_is_refused(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(healthy, 1)
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match=rf"{path.name} .*1,000"):
        diagnose([healthy])


def test_a_log_and_its_packed_copy_are_two_logs(healthy: Path) -> None:
    text = (healthy / LOG.format(1)).read_bytes()
    packed(healthy, 1)
    (healthy / LOG.format(1)).write_bytes(text)
    with pytest.raises(ConfigError, match="rank 1 "):
        diagnose([healthy])


@pytest.mark.parametrize("end", ["log.zst", "log.1", "log.xz"])
def test_a_log_with_a_different_end_is_listed(healthy: Path, end: str) -> None:
    shutil.copy(healthy / LOG.format(1), healthy / f"dedicated_log_torch_trace_rank_1_x.{end}")
    verdict = diagnose([healthy])
    assert verdict.exit_code == 0
    assert f"rank_1_x.{end}" in check(verdict, LEFT_OUT).details[0]


def test_a_link_to_a_log_has_the_rank_of_its_own_name(healthy: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    for rank in (0, 1):
        (tmp_path / "links" / NAME.format(rank)).symlink_to(healthy / LOG.format(1 - rank))
    paths = find_logs([tmp_path / "links"]).paths
    assert {rank: path.resolve().name for rank, path in paths.items()} == {0: LOG.format(1), 1: LOG.format(0)}


def test_a_log_that_two_folders_hold_is_one(healthy: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    for rank in (0, 1):
        (tmp_path / "links" / LOG.format(rank)).symlink_to(healthy / LOG.format(rank))
    assert diagnose([healthy, tmp_path / "links"]).exit_code == 0


def changed(text: str, change: Callable[[str], str]) -> str:
    """The records of a log, changed, with the hash that torch writes of a payload."""
    records = []
    for record in re.split(r"\n(?=[A-Z]\d{4} )", change(text).rstrip("\n")):
        head, _, payload = record.partition("\n")
        plain = "\n".join(line[1:] for line in payload.split("\n"))
        md5 = hashlib.md5(plain.encode(), usedforsecurity=False).hexdigest()
        head = re.sub(r'(?<="has_payload": ")[0-9a-f]+', md5, head)
        records.append(f"{head}\n{payload}\n" if payload else f"{head}\n")
    return "".join(records)


def test_a_function_with_a_name_of_any_length_is_named_in_lines_of_bounded_length(faulty: Path, tmp_path: Path) -> None:
    for path in faulty.iterdir():
        path.write_text(changed(path.read_text(), lambda text: text.replace("healthy", LONG)))
    with limited_cpu(20):
        verdict = diagnose([faulty])
    for is_terminal in (True, False):
        lines = printed(verdict, tmp_path / "out", is_terminal=is_terminal)
        assert len(lines) <= 40 and max(map(len, lines)) < 4200
        assert any("characters)..." in line for line in lines)
    assert LONG in (tmp_path / "out" / "verdict.json").read_text()


def copied(folder: Path, number: int) -> None:
    """The compiles of a job, as often, each in a function of its own."""

    def in_function(text: str, number: int) -> str:
        return text.replace('"frame_id": ', f'"frame_id": {number + 1}').replace("healthy", f"healthy_{number}")

    for path in folder.iterdir():
        text = path.read_text()
        copies = [changed(text, functools.partial(in_function, number=n)) for n in range(number)]
        path.write_text("".join(copies))


def test_equal_differences_are_printed_once_with_their_number(faulty: Path, tmp_path: Path) -> None:
    copied(faulty, 40)
    verdict = diagnose([faulty])
    number = len([found for found in verdict.divergences if found.is_red])
    assert number == 40
    lines = printed(verdict, tmp_path / "out", is_terminal=False)
    assert len(lines) <= 40
    assert any(f"and {number - 1} more" in line for line in lines)
    text = (tmp_path / "out" / "report.txt").read_text()
    assert "healthy_39" in text and f"and {number - 4} more" not in text
