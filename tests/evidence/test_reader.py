"""Whatever is in place of a record on disk is one line with the file's name and exit code 2: no traceback, no hang."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.evidence import samples
from tpcompile import cli
from tpcompile.bench import baseline
from tpcompile.config import load
from tpcompile.errors import ConfigError
from tpcompile.evidence.judgement.verdict import CAPTURED, SENTINEL
from tpcompile.evidence.records import SCHEMA_VERSION, RankRecord, Status, Verdict, reader
from tpcompile.evidence.records.bounds import MAX_RANKS
from tpcompile.evidence.rundir import RankStatus, RunDir
from tpcompile.fusion import manifest

DEEP = "[" * 100_000
DAMAGES: dict[str, tuple[str | bytes, str]] = {
    "list": ("[]", "it holds a list, not an object"),
    "null": ("null", "it holds null, not an object"),
    "number": ("3", "it holds a number, not an object"),
    "nothing": ("", "it is not JSON"),
    "half": ('{"rank": 0', "it is not JSON"),
    "deep": (f'{{"facts": {DEEP}', "its JSON is nested too deeply"),
    "digits": (f'{{"rank": {"9" * 5000}}}', "it holds a number with too many digits"),
    "surrogate": ('{"rank": "\\ud800"}', "it is not text in UTF-8"),
    "bytes": (b"\xff\xfe{", "it is not text in UTF-8"),
}
FILES = ("rank_1/record.json", "rank_1/status.json", "verdict.json", "run.json", "config.json")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of a gate on two ranks that agree, of which rank 2 left a status only."""
    directory = RunDir.create(tmp_path / "run")
    directory.write_run({"kind": CAPTURED, "allowed": [], "timeout_s": 1.0})
    for rank in (0, 1):
        directory.write_record(samples.record(rank, samples.compiled(), world_size=3))
        directory.write_status(RankStatus(rank=rank, world_size=3, pid=1, host="h", phase="p", state="finished"))
    directory.write_verdict(Verdict(status=Status.PASS, exit_code=0, world_size=3, summary="ok"))
    return directory


def compared(run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and stderr of `tpcompile compare`."""
    monkeypatch.setattr(sys, "argv", ["tpcompile", "compare", str(run.path)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0), capsys.readouterr().err


def replace(path: Path, content: str | bytes) -> None:
    """Put something else in place of a file."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_compare_of_a_damaged_file_is_one_line(
    run: RunDir, name: str, damage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content, says = DAMAGES[damage]
    if name == "config.json":
        run.write_run({})
    replace(run.path / name, content)
    code, err = compared(run, monkeypatch, capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert f"error: {run.path / name} is damaged: {says}" in err


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("make", "says"), [(Path.mkdir, "a folder"), (os.mkfifo, "a pipe or a device")])
def test_what_is_no_file_is_one_line_and_no_hang(
    run: RunDir, name: str, make: Callable[[Path], None], says: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if name == "config.json":
        run.write_run({})
    path = run.path / name
    path.unlink(missing_ok=True)
    make(path)
    code, err = compared(run, monkeypatch, capsys)
    assert (code, err) == (2, f"error: {path} is {says}, not a file\n")


def test_a_file_larger_than_any_record_is_not_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_BYTES", 100)
    with pytest.raises(ConfigError, match=r"record\.json .* at most 100"):
        run.read_records()


def test_what_is_wrong_is_shown_in_a_line_of_its_own_size(run: RunDir) -> None:
    fields = json.loads(samples.record(1).to_json()) | {"n" * 300_000: 1}
    replace(run.path / "rank_1/record.json", json.dumps(fields))
    with pytest.raises(ConfigError) as error:
        run.read_records()
    assert len(str(error.value)) < 600


RECORDS: Iterable[tuple[dict[str, object], str]] = [
    ({"world_size": 0}, r"world_size: Input should be greater than or equal to 1"),
    ({"world_size": 10**7}, rf"world_size: Input should be less than or equal to {MAX_RANKS}"),
    ({"world_size": "many"}, r"world_size: Input should be a valid integer"),
    ({"rank": -1}, r"rank: Input should be greater than or equal to 0"),
    ({"rank": 10**3000}, r"rank: .* should be"),
    ({"rank": 3}, r"it is of rank 3 of 3 ranks"),
    ({"compiles": None}, r"compiles: Input should be a valid tuple"),
    ({"compiles": [], "counters": [{"phase": "", "graphs": 2}]}, r"it counts 2 graphs and holds no compile"),
]


@pytest.mark.parametrize(("changes", "says"), RECORDS)
def test_a_record_that_no_rank_wrote_is_refused(run: RunDir, changes: dict[str, object], says: str) -> None:
    fields = json.loads(samples.record(1, samples.compiled(), world_size=3).to_json())
    replace(run.path / "rank_1/record.json", json.dumps(fields | changes))
    with pytest.raises(ConfigError, match=says):
        run.read_records()


def test_a_record_without_its_compiles_is_no_pass(run: RunDir) -> None:
    fields = json.loads(samples.record(1, samples.compiled(), world_size=3).to_json())
    del fields["compiles"]
    replace(run.path / "rank_1/record.json", json.dumps(fields))
    with pytest.raises(ConfigError, match=r"record\.json .*lacks compiles"):
        run.read_records()


def test_two_records_of_one_rank_are_named_and_no_rank_is_missing(run: RunDir) -> None:
    replace(run.path / "rank_0/record.json", (run.path / "rank_1/record.json").read_bytes())
    with pytest.raises(ConfigError, match=r"rank 1: \S*rank_0/record\.json and \S*rank_1/record\.json"):
        run.read_records()


def test_a_folder_that_is_named_like_no_rank_is_left_out(run: RunDir) -> None:
    for name in ("rank_x", "rank_", "rank_" + "9" * 200):
        (run.path / name).mkdir()
        replace(run.path / name / "record.json", "[]")
    assert [record.rank for record in run.read_records()] == [0, 1]


def test_a_large_world_of_lost_ranks_is_one_check(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        run.write_record(samples.record(rank, samples.compiled(), world_size=MAX_RANKS))
    monkeypatch.setattr(sys, "argv", ["tpcompile", "compare", str(run.path)])
    with pytest.raises(SystemExit):
        cli.main()
    out = capsys.readouterr().out
    assert f"ranks 2-{MAX_RANKS - 1} are missing" in out
    assert len(out) < 10_000


@pytest.mark.parametrize("kind", [SENTINEL, CAPTURED])
@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"timeout_s": 1.0}, "allowed: Field required"),
        ({"allowed": []}, "timeout_s: Field required"),
        ({"allowed": [["graph", "x"]], "timeout_s": 1.0}, "allowed.0.2: Field required"),
        ({"allowed": [["no layer", "x", "y"]], "timeout_s": 1.0}, "allowed.0.0: Input should be"),
    ],
)
def test_a_run_json_that_does_not_say_how_it_was_judged_is_one_line(
    run: RunDir, kind: str, facts: dict[str, object], says: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run.write_run({"kind": kind} | facts)
    code, err = compared(run, monkeypatch, capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "run.json" in err and says in err


LONG = "x" * 300_000


@pytest.mark.parametrize("version", [LONG, "\x1b[31mred", {"a": LONG}, "two\nlines"], ids=lambda value: str(value)[:9])
def test_a_version_of_a_record_is_printed_short_and_plain(
    run: RunDir, version: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = json.loads(samples.record(1).to_json()) | {"schema_version": version}
    replace(run.path / "rank_1/record.json", json.dumps(fields))
    code, err = compared(run, monkeypatch, capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "has schema" in err and len(err) < 1000 and "\x1b" not in err


@pytest.mark.parametrize("facts", [{"a": None}, {"errors": 3}, {"\x1b[31m": 1}, {"fusion": 3}], ids=str)
def test_measurements_that_the_gate_did_not_make_are_damage(
    run: RunDir, facts: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_run({})
    run.write_config(load("cpu_smoke", modes=("C",)).model_dump_json())
    run.write_record(samples.record(1, samples.compiled(), world_size=3, facts=facts))
    code, err = compared(run, monkeypatch, capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "rank_1/record.json" in err and "gatefacts" in err and "\x1b" not in err


DOMAINS = [
    (("tp", "tp"), True),
    (("world 0-1", "world 0-1"), True),
    (("tp 0,2", "tp 1,3"), True),
    (("tp 0", "tp 1"), True),
    (("world 0-1", "other"), False),
    (("tp", "tp 1"), False),
    (("world 0-1", "tp 0-1"), False),
    (("tp 0-1", "tp 1-2"), False),
    (("tp", "other"), False),
]


@pytest.mark.parametrize(("domains", "is_whole"), DOMAINS)
def test_ranks_that_are_compared_with_other_ranks_than_they_say_are_no_pass(
    run: RunDir, domains: tuple[str, str], is_whole: bool
) -> None:
    for rank, domain in enumerate(domains):
        run.write_record(samples.record(rank, samples.compiled(), world_size=3, domain=domain))
    if is_whole:
        assert len(run.read_records()) == 2
        return
    with pytest.raises(ConfigError, match=r"record\.json .*domain '"):
        run.read_records()


def test_a_rank_that_compiled_nothing_need_not_know_its_domain(run: RunDir) -> None:
    for rank in (0, 1):
        run.write_record(samples.record(rank, samples.compiled(), world_size=3, domain="tp 0-1"))
    run.write_record(samples.record(2, world_size=3))
    assert len(run.read_records()) == 3


def test_what_was_written_is_read_whatever_it_holds(run: RunDir) -> None:
    """The negative control of the rules above: a whole record is no damaged one."""
    record = RankRecord(rank=2, world_size=3, facts={"error": float("nan"), "name": "\u00e9", "n": 10**4000})
    run.write_record(record)
    assert run.read_records()[2].facts["n"] == 10**4000


READERS: dict[str, Callable[[Path], object]] = {
    "manifest": manifest.read,
    "baseline of the benchmark": baseline.read,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", READERS)
def test_every_other_record_on_disk_is_read_the_same_way(kind: str, damage: str, tmp_path: Path) -> None:
    content, says = DAMAGES[damage]
    replace(tmp_path / "file.json", content)
    with pytest.raises(ConfigError, match=says):
        READERS[kind](tmp_path / "file.json")


def test_no_other_module_of_the_evidence_reads_json_from_disk() -> None:
    """The next record that is read from disk has to be read by the one reader."""
    package = Path(reader.__file__).parents[2]
    others = [
        package / name for name in ("evidence", "fusion", "bench", "gate", "report", "cli", "by_size", "fastpath")
    ]
    allowed = {"recorder.py", "measure_mode.py", "__main__.py"}  # written for itself by the process that reads it
    found = []
    for path in (path for folder in others for path in folder.rglob("*.py")):
        text = path.read_text()
        if "read_text())" in text and ("json.loads(" in text or "validate_json(" in text) and path.name not in allowed:
            found.append(str(path.relative_to(package)))
    assert found == []


def test_the_schema_version_is_still_checked_first(run: RunDir) -> None:
    replace(run.path / "verdict.json", json.dumps({"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(ConfigError, match="has schema"):
        run.read_verdict()
