from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report import samples
from tpcompile import cli, launch
from tpcompile.cli.outputs import with_stdout
from tpcompile.errors import ConfigError, DivergenceError, PreflightError, TpCompileError
from tpcompile.evidence.records import Status, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate import replay as replay_module
from tpcompile.report.screen import MAX_LINES
from tpcompile.request import GateRequest

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tpcompile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`main()` with arguments: exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tpcompile", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_help_lists_every_command(tpcompile: Run) -> None:
    code, out, _ = tpcompile("--help")
    assert code == 0
    assert all(name in out for name in ("gate", "compare", "diagnose", "presets", "version"))


@pytest.mark.parametrize("args", ["-h", "gate -h", "compare -h", "diagnose -h", "presets -h"])
def test_h_is_help(tpcompile: Run, args: str) -> None:
    code, out, _ = tpcompile(*args.split())
    assert (code, out.startswith("Usage: tpcompile")) == (0, True)


@pytest.mark.parametrize(
    "args", [("nope",), ("gate", "--nope"), ("gate", "--nproc", "two"), ("gate", "--mode", "D"), ("compare",)]
)
def test_usage_errors_end_with_2(tpcompile: Run, args: tuple[str, ...]) -> None:
    code, _, err = tpcompile(*args)
    assert code == 2
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--preset", "nope"), 2, "error: unknown preset 'nope'"),
        (("--set", "block.nope=1"), 2, "error: unknown config key 'nope'"),
        (("--set", "block.dim"), 2, "error: --set 'block.dim': write key=value"),
        (("--nproc", "3"), 2, "error: tp=3 does not divide num_heads=8"),
        (("--run-dir", "/dev/null/run"), 4, "error: cannot write run directory /dev/null/run"),
    ],
)
def test_bad_input_of_the_gate_is_one_line_and_its_code(
    tpcompile: Run, args: tuple[str, ...], code: int, message: str
) -> None:
    found, out, err = tpcompile("gate", "--device", "cpu", *args)
    assert (found, out) == (code, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_cuda_that_is_absent_ends_with_4(tpcompile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, _, err = tpcompile("gate", "--device", "cuda", "--preset", "cpu_smoke")
    assert code == 4
    assert err.startswith("error: --device cuda: ")


@pytest.mark.parametrize(
    ("error", "code"),
    [(DivergenceError, 1), (ConfigError, 2), (TpCompileError, 3), (PreflightError, 4)],
)
def test_each_error_class_ends_with_its_code(
    tpcompile: Run, monkeypatch: pytest.MonkeyPatch, error: type[TpCompileError], code: int
) -> None:
    monkeypatch.setattr(launch, "plan", lambda request: (_ for _ in ()).throw(error("broken")))
    assert tpcompile("gate") == (code, "", "error: broken\n")


def test_an_unexpected_exception_is_a_bug_with_its_traceback(tpcompile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "plan", lambda request: 1 // 0)
    code, _, err = tpcompile("gate")
    assert code == 3
    assert "ZeroDivisionError" in err
    assert err.splitlines()[-1].startswith("error: ") and " bug " in err


def test_gate_hands_every_option_to_the_launcher(tpcompile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[GateRequest] = []

    def plan(request: GateRequest) -> launch.Plan:
        asked.append(request)
        raise ConfigError("enough")

    monkeypatch.setattr(launch, "plan", plan)
    options = "--nproc 8 --mode all --preset wan14b_8 --layers 2 --train --dtype float32 --set a=1 --set b=2"
    tpcompile("gate", *options.split(), "--run-dir", "x", "--device", "cuda", "--timeout-s", "60")
    assert asked == [
        GateRequest(
            nproc=8,
            mode="all",
            preset="wan14b_8",
            layers=2,
            train=True,
            dtype="float32",
            overrides=["a=1", "b=2"],
            run_dir=Path("x"),
            device="cuda",
            timeout_s=60.0,
        )
    ]


@pytest.mark.parametrize(("flags", "amount"), [([], "all"), (["-q"], "last"), (["--json"], "json")])
def test_in_a_job_that_is_started_already_this_process_becomes_a_rank(
    flags: list[str], amount: str, tpcompile: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[str] = []
    monkeypatch.setattr(launch, "become_rank", lambda request, amount: became.append(amount) or sys.exit(0))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    assert (tpcompile("gate", *flags)[0], became) == (0, [amount])


def test_compare_replays_a_run_and_ends_with_its_code(
    tpcompile: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(replay_module, "replay", lambda *_: samples.failing())
    code, out, _ = tpcompile("compare", str(RunDir.create(tmp_path / "run").path))
    assert code == 1
    assert "FAIL (exit 1)" in out


def test_compare_of_a_missing_run_is_one_line(tpcompile: Run, tmp_path: Path) -> None:
    code, _, err = tpcompile("compare", str(tmp_path / "nope"))
    assert code == 2
    assert err.startswith("error: ") and err.endswith(f"{tmp_path / 'nope'}\n") and err.count("\n") == 1


def test_compare_of_a_truncated_record_is_one_line(tpcompile: Run, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.write_text("rank_0/record.json", '{"schema_ver')
    code, _, err = tpcompile("compare", str(run.path))
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1


JOBS = Path(__file__).parent.parent / "data" / "jobs" / "torch-2.13.0"


def test_diagnose_names_the_cause_and_writes_json_and_junit(tpcompile: Run, tmp_path: Path) -> None:
    json_path, junit_path = tmp_path / "verdict.json", tmp_path / "junit.xml"
    paths = ["--json", str(json_path), "--junitxml", str(junit_path), "--run-dir", str(tmp_path / "rest")]
    code, out, _ = tpcompile("diagnose", str(JOBS / "stride"), *paths)
    assert (code, Cause.STRIDE.value in out) == (1, True)
    assert out.count("\n") <= MAX_LINES
    assert Cause.STRIDE.advice in (tmp_path / "rest" / "report.txt").read_text()
    assert Verdict.model_validate_json(json_path.read_text()).exit_code == 1
    assert Cause.STRIDE.value in junit_path.read_text()


def test_diagnose_prints_only_json_when_asked_to(tpcompile: Run) -> None:
    code, out, _ = tpcompile("diagnose", str(JOBS / "cold_shared"), "--json", "-")
    assert (code, Verdict.model_validate_json(out).status) == (0, Status.PASS)


def test_diagnose_takes_the_logs_themselves_and_writes_what_it_is_told_to(tpcompile: Run, tmp_path: Path) -> None:
    logs = [str(path) for path in sorted((JOBS / "cold_shared").glob("*.log"))]
    code, out, _ = tpcompile("diagnose", *logs, "--run-dir", str(tmp_path / "rest"))
    assert (code, Verdict.model_validate_json((tmp_path / "rest/verdict.json").read_text()).exit_code) == (0, 0)
    assert f"full report: {tmp_path}/rest/report.txt" in out.replace("\n", "")
    assert tpcompile("diagnose", str(tmp_path / "nothing"))[0] == 2


def test_diagnose_of_a_folder_without_logs_is_one_line(tpcompile: Run, tmp_path: Path) -> None:
    code, _, err = tpcompile("diagnose", str(tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: ")


def test_presets_are_listed_with_their_sizes(tpcompile: Run) -> None:
    code, out, _ = tpcompile("presets")
    assert code == 0
    assert any(line.split()[:4] == ["wan14b", "wan", "5120", "40"] for line in out.splitlines())


def test_version_names_torch_without_importing_it(tpcompile: Run) -> None:
    code, out, _ = tpcompile("version")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["tpcompile", "torch", "triton", "python"]


NO_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
import pkgutil, importlib
import tpcompile.evidence, tpcompile.report, tpcompile.cli, tpcompile.launch
for package in (tpcompile.evidence, tpcompile.report, tpcompile.cli):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
sys.argv = ["tpcompile", *sys.argv[1:]]
tpcompile.cli.main()
"""


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--help"], 0),
        (["presets"], 0),
        (["version"], 0),
        (["explain", "rank-branch"], 0),
        (["gate", "--nproc", "3", "--device", "cpu"], 2),
        (["diagnose", str(JOBS / "stride")], 1),
        (["report", str(JOBS / "stride"), "--html", "/dev/null"], 0),
    ],
)
def test_evidence_report_launch_and_cli_never_import_torch(args: list[str], code: int) -> None:
    command = [sys.executable, "-c", NO_TORCH, *args]
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "CXX": sys.executable}
    )
    assert (found.returncode, "AssertionError" in found.stderr) == (code, False), found.stderr


def test_help_imports_neither_pydantic_nor_rich() -> None:
    code = "import sys, tpcompile.cli; print(sorted({'pydantic', 'rich', 'torch', 'yaml'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def options_without_a_spelling(source: str) -> list[int]:
    """Lines of options with a metavar and no name of their own: typer 0.27 makes `--ARCH` of a metavar ARCH."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    options = [call for call in calls if ast.unparse(call.func) == "typer.Option" and not call.args]
    return [call.lineno for call in options if any(word.arg == "metavar" for word in call.keywords)]


def test_an_option_with_a_metavar_is_spelled() -> None:
    files = sorted((Path(cli.__file__).parents[1]).rglob("*.py"))
    assert {str(path): lines for path in files if (lines := options_without_a_spelling(path.read_text()))} == {}
    assert options_without_a_spelling('typer.Option(metavar="ARCH")\ntyper.Option("--a", metavar="A")') == [1]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("compare run --json", "compare run --json=-"),
        ("compare --json -q run", "compare --json=- -q run"),
        ("compare --json file run", "compare --json file run"),
        ("compare --json - run", "compare --json - run"),
        ("run --json x -- torchrun train.py --json --lr 1", "run --json x -- torchrun train.py --json --lr 1"),
        ("", ""),
    ],
)
def test_json_without_a_file_goes_to_stdout(given: str, found: str) -> None:
    assert with_stdout(given.split()) == found.split()


@pytest.mark.parametrize("command", ["compare", "diagnose"])
def test_every_command_with_a_verdict_writes_the_same_files(
    command: str, tpcompile: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if command == "compare":
        monkeypatch.setattr(replay_module, "replay", lambda *_: samples.failing())
        where = str(RunDir.create(tmp_path / "run").path)
    else:
        where = str(JOBS / "stride")
    names = {"--json": "a.json", "--junitxml": "a.xml", "--html": "a.html"}
    flags = [text for flag, name in names.items() for text in (flag, str(tmp_path / name))]
    code, out, _ = tpcompile(command, where, "-q", *flags)
    assert (code, out.count("FAIL (exit 1)")) == (1, 1)
    assert Verdict.model_validate_json((tmp_path / "a.json").read_text()).exit_code == 1
    assert "<testsuite" in (tmp_path / "a.xml").read_text()
    assert "FAIL (exit 1)" in (tmp_path / "a.html").read_text()
    assert not list(tmp_path.glob(".*"))
    alone = tpcompile(command, where, "--json")
    assert (alone[0], Verdict.model_validate_json(alone[1]).exit_code) == (1, 1)
    assert tpcompile(command, where, "-q", "--html", str(tmp_path / "no" / "a.html"))[0] == PreflightError.exit_code


def test_report_writes_a_page_and_a_trace_and_ends_with_0_whatever_the_verdict(tpcompile: Run, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    code, out, _ = tpcompile("report", str(JOBS / "stride"), "--html", str(page), "--perfetto", str(trace))
    assert (code, "FAIL (exit 1)" in out) == (0, True)
    assert Cause.STRIDE.value in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    code, _, err = tpcompile("report", str(tmp_path / "nothing"))
    assert (code, err.count("\n")) == (2, 1)


def test_a_target_is_an_argument_of_the_gate_too(tpcompile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[GateRequest] = []
    monkeypatch.setattr(launch, "plan", lambda request: asked.append(request) or sys.exit(0))
    assert tpcompile("gate", "tests.gate.own:functional", "--nproc", "2")[0] == 0
    assert asked[0].target == "tests.gate.own:functional"
    assert tpcompile("gate", "a:b", "--target", "c:d", "--nproc", "2")[0] == 2


@pytest.mark.parametrize("flags", [["--html", "x"], ["--json", "x"], ["--junitxml", "x"]])
def test_a_rank_of_a_job_writes_no_file_of_the_whole(
    flags: list[str], tpcompile: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    code, _, err = tpcompile("gate", *flags)
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize("name", [name for name, *_ in cli._COMMANDS])
def test_no_line_of_the_list_of_commands_is_cut(tpcompile: Run, name: str) -> None:
    _, out, _ = tpcompile("--help")
    (line,) = [line for line in out.splitlines() if line.startswith(f"  {name} ")]
    assert line.endswith(".") and "..." not in line


def test_no_line_of_the_list_of_fusions_commands_is_cut() -> None:
    """In a process of its own: the command becomes another one, which imports torch."""
    command = [sys.executable, "-m", "tpcompile", "fusion", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    listed = out.partition("Commands:")[2].strip().splitlines()
    assert len(listed) == 8
    assert [line for line in listed if "..." in line or not line.endswith(".")] == []
