"""Arguments of the gate -> a torchrun of it, forked or real: its verdict, its last lines, what it left running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import forked
from tpcompile.evidence.records import Check, CheckId, Layer, Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.process_tree import run_tree

REPRO = forked.ROOT / "repro" / "tp_compile_repro.py"
MANY = Path(__file__).parent / "many.py"
TRACED_TARGET = Path(__file__).parent / "traced.py"
AOT = ("compile.backend=aot_eager",)

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None
from tpcompile import cli
sys.argv[0] = "tpcompile"
cli.main()
"""


def by_id(checks: Iterable[Check]) -> dict[CheckId | Layer, Check]:
    """Checks by what they are about: a layer, or the id of any other check."""
    return {check.layer or check.id: check for check in checks}


@dataclass(frozen=True)
class GateRun:
    """How one torchrun of the gate ended."""

    exit_code: int
    verdict: Verdict | None
    stderr: str
    run_dir: Path
    left_running: tuple[str, ...] = ()

    @classmethod
    def of(cls, ended: forked.Ended, run_dir: Path) -> GateRun:
        """A run of forked ranks."""
        verdict = RunDir(run_dir).read_verdict()
        return cls(ended.returncode, verdict, last_lines(ended.stderr), run_dir, ended.left_running)

    @property
    def judged(self) -> Verdict:
        """The verdict; fails the test with the ranks' last lines when there is none."""
        assert self.verdict is not None, f"no verdict, torchrun ended with {self.exit_code}:\n{self.stderr}"
        return self.verdict

    def failed(self) -> dict[CheckId | Layer, Check]:
        """Failed checks by id or layer."""
        return by_id(check for check in self.judged.checks if check.is_red)


def run_gate(run_dir: Path, *args: str, nproc: int = 2) -> GateRun:
    """`torchrun repro/tp_compile_repro.py ARGS` on `nproc` forked ranks on CPU."""
    command = [str(REPRO), "--run-dir", str(run_dir), "--device", "cpu", "--quiet-report", *args]
    return GateRun.of(forked.torchrun(command, nproc=nproc), run_dir)


def run_fresh_gate(run_dir: Path, *args: str, nproc: int = 2, device: str = "cpu") -> GateRun:
    """The same, started as a user does: every process a new interpreter."""
    command = [str(REPRO), "--run-dir", str(run_dir), "--device", device, "--quiet-report", *args]
    code, stderr = torchrun(run_dir.with_suffix(".err"), command, nproc=nproc)
    left = tuple(leftovers(run_dir))
    return GateRun(code, RunDir(run_dir).read_verdict(), stderr, run_dir, left)


def run_with_caches(run_dir: Path, caches: Path, *args: str, hash_seed: int | None = None) -> GateRun:
    """The gate on two ranks, each with the Inductor cache `caches`/RANK; rank 1 with a hash seed of its own."""
    target = [forked.ROOT / "tests/gate/own_cache.py", caches]
    environ = {**os.environ, **({"HASH_SEED": str(hash_seed)} if hash_seed else {})}
    command = [*target, "--run-dir", run_dir, "--device", "cpu", "--quiet-report", *args]
    return GateRun.of(forked.torchrun(command, environ=environ), run_dir)


def run_many(
    folder: Path,
    jobs: Mapping[str, Mapping[str, Any]],
    *,
    nproc: int = 2,
    target: Path = MANY,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, GateRun]:
    """Every job in one torchrun of forked ranks; the exit code of each is that of its own run."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    ended = forked.torchrun([target, folder], nproc=nproc, environ=environ, timeout_s=500)
    code, stderr = ended.returncode, last_lines(ended.stderr)
    done = {name: folder / name / "process_0.json" for name in jobs}
    codes = {name: json.loads(path.read_text())["exit_code"] if path.exists() else code for name, path in done.items()}
    return {name: GateRun(codes[name], RunDir(folder / name).read_verdict(), stderr, folder / name) for name in jobs}


def torchrun(
    stderr: Path,
    command: Sequence[str],
    *,
    nproc: int = 2,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 200,
) -> tuple[int, str]:
    """Exit code and last lines of stderr of a real torchrun; it is killed whole after `timeout_s`, exit code 124."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    to_file = ["sh", "-c", 'exec "$@" >/dev/null 2>"$0"', str(stderr)]
    variables = {**os.environ, "PYTHONPATH": forked.PYTHONPATH, "OMP_NUM_THREADS": "1", **(environ or {})}
    outcome = run_tree([*to_file, *launcher, *command], environ=variables, timeout_s=timeout_s, grace_s=3)
    said = stderr.read_text(errors="replace") if stderr.exists() else ""
    return 124 if outcome.timed_out else outcome.exit_code, last_lines(said)


def last_lines(text: str) -> str:
    """Enough of stderr to see why a run has no verdict."""
    return "\n".join(text.splitlines()[-60:])


def compare(run_dir: Path) -> tuple[int, str]:
    """`tpcompile compare RUN` in a forked process: exit code and output."""
    ended = forked.run_python(["-m", "tpcompile", "compare", run_dir], environ={**os.environ, "COLUMNS": "160"})
    return ended.returncode, ended.stdout + ended.stderr


def compare_offline(run_dir: Path) -> tuple[int, str]:
    """`tpcompile compare RUN` in a process that refuses to import torch: exit code and output."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "compare", str(run_dir)]
    environ = {**os.environ, "PYTHONPATH": forked.PYTHONPATH, "COLUMNS": "160"}
    found = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    return found.returncode, found.stdout + found.stderr


def leftovers(run_dir: Path) -> list[str]:
    """Command lines of processes that still mention this run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(run_dir) in text:
            found.append(text)
    return found
