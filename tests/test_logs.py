"""loguru and the host program: the package is silent until it is enabled, adds one file, and removes no sink."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loguru import logger

from tpcompile import logs

HOST = """
import sys
from loguru import logger
logger.remove()
logger.add(sys.stdout, format="host: {message}")
def log(name):
    exec("from loguru import logger\\nlogger.warning('from ' + __name__)", {"__name__": name})
"""


def _host(program: str) -> list[str]:
    found = subprocess.run([sys.executable, "-c", HOST + program], capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def test_the_package_is_silent_until_the_program_enables_it() -> None:
    program = "import tpcompile; log('tpcompile.x'); logger.enable('tpcompile'); log('tpcompile.y'); log('host')"
    assert _host(program) == ["host: from tpcompile.y", "host: from host"]


def test_a_later_import_of_a_part_does_not_silence_the_package_again() -> None:
    program = "import tpcompile; logger.enable('tpcompile'); import tpcompile.logs; log('tpcompile.x')"
    assert _host(program) == ["host: from tpcompile.x"]


def test_a_run_of_the_gate_leaves_the_sinks_of_the_program_alone(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from tpcompile import config, gate, logs
try:
    with logs.kept(Path({str(tmp_path)!r}), rank=3):
        logger.enable("tpcompile"); log("tpcompile.gate"); log("host")
        1 / 0
except ZeroDivisionError:
    log("tpcompile.gate")
"""
    assert _host(program) == ["host: from tpcompile.gate", "host: from host", "host: from tpcompile.gate"]
    kept = [json.loads(line)["record"]["message"] for line in (tmp_path / "rank_3.jsonl").read_text().splitlines()]
    assert kept == ["from tpcompile.gate"]


def test_only_the_command_line_and_the_programs_of_ranks_set_sinks_up() -> None:
    root = Path(__file__).resolve().parents[1]
    paths = [*(root / "tpcompile").rglob("*.py"), *(root / "repro").rglob("*.py")]
    callers = {str(path.relative_to(root)) for path in paths if "logs.setup(" in path.read_text()}
    ranks = {"tpcompile/gate/in_rank.py", "tpcompile/gate/__main__.py"}
    assert callers == {
        "tpcompile/cli/gate.py",
        "tpcompile/dryrun/__main__.py",
        "tpcompile/fastpath/certify/__main__.py",
        *ranks,
    }


def test_setup_sends_warnings_of_the_package_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        logs.setup(rank=2)
        logger.info("quiet")
        logger.warning("loud")
        assert capsys.readouterr().err == "[rank 2] WARNING: loud\n"
    finally:
        logger.disable("tpcompile")
        logger.remove()
        logger.add(sys.__stderr__)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_log_lines_on_a_full_disk_are_lost_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), open("/dev/full", "w") as file:
        file.write("what any other file says")
    sink = logs.LogFile(Path("/dev/full"))
    handler = logger.add(sink, serialize=True)
    logger.warning("lost")
    logger.remove(handler)
    sink.close()
    assert "Logging error" not in capfd.readouterr().err


def test_a_log_file_that_cannot_be_made_takes_lines_all_the_same(tmp_path: Path) -> None:
    sink = logs.LogFile(tmp_path / "nowhere" / "rank_0.jsonl")
    sink.write("lost")
    sink.close()
