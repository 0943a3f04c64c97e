"""Files of a user -> a pytest session in a process of its own, with the plugin: how it ended, and its junit.xml."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

from tests.forked import PYTHONPATH, run_python

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """One test in junit.xml."""

    name: str
    failures: tuple[str, ...]
    """Message and text of each failure and error."""
    skipped: str
    """Why it was skipped, or failed as expected."""
    output: str
    time_s: float


@dataclass(frozen=True)
class Session:
    """How a session ended."""

    returncode: int
    output: str
    cases: dict[str, Case]
    wall_s: float


def run_session(
    folder: Path,
    sources: dict[str, str],
    *arguments: str,
    timeout_s: float = 280.0,
    environ: Mapping[str, str] = MappingProxyType({}),
    is_forked: bool = False,
) -> Session:
    """Run the files, by their names without `test_` and `.py`, with the plugin and these arguments of pytest.

    With `is_forked` the session, its workers and its server of ranks have torch already, which saves 10 s of CPU time;
    test_one_server.py starts them as a user does.
    """
    for name, source in sources.items():
        file = f"test_{name}.py" if name != "conftest" else "conftest.py"
        (folder / file).write_text(source)
    (folder / "pytest.ini").touch()  # its rootdir
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    plugin = ["-p", "tpcompile.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    reports = [f"--junitxml={folder / 'junit.xml'}", "-o", "junit_logging=all", f"--basetemp={folder / 'tmp'}"]
    words = ["-m", "pytest", *plugin, *reports, *arguments]
    environ = {**own, "PYTHONPATH": PYTHONPATH, **environ}
    began_s = time.monotonic()
    if is_forked:
        done: Any = run_python(words, environ=environ, cwd=folder, timeout_s=timeout_s)
    else:
        command, pipe = [sys.executable, *words], subprocess.PIPE
        done = subprocess.run(command, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True, timeout=timeout_s)
    wall_s = time.monotonic() - began_s
    return Session(done.returncode, done.stdout + done.stderr, _cases(folder / "junit.xml"), wall_s)


def source(name: str) -> str:
    """A file of this folder."""
    return (HERE / f"{name}.py").read_text()


def line_of(name: str, mark: str) -> str:
    """`test_NAME.py:LINE` of the line of a file of this folder with the comment `# line: MARK`."""
    lines = source(name).splitlines()
    (number,) = (number for number, line in enumerate(lines, start=1) if re.search(rf"# line: {mark}$", line))
    return f"test_{name}.py:{number}"


def _cases(junit: Path) -> dict[str, Case]:
    found = {}
    for element in ElementTree.parse(junit).iter("testcase"):
        failed = [*element.findall("failure"), *element.findall("error")]
        skipped = element.find("skipped")
        output = [part.text or "" for part in (*element.findall("system-out"), *element.findall("system-err"))]
        case = Case(
            name=element.get("name", ""),
            failures=tuple(f"{part.get('message')}\n{part.text}" for part in failed),
            skipped="" if skipped is None else skipped.get("message", ""),
            output="\n".join(output),
            time_s=float(element.get("time", "0")),
        )
        found[case.name] = case
    return found
