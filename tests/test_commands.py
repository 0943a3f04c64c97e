"""Every line of the ```bash blocks of README and docs/ is run here, in a small form, or has its reason below."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forked import PYTHONPATH, ROOT, TORCHRUN, Ended, run_python
from tpcompile.evidence.records import Verdict

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PROGRAMS = re.compile(
    r"^(\$ )?(\w+=\S+ )?(tpcompile|torchrun|srun|python3?|pip|pytest|git|scripts/\S+) (?!\w+:)[\w./-]"
)
"""What the first line of a block looks like that ought to be called one of bash."""
TRACES = ROOT / "tests/data/jobs/torch-2.13.0/cold_shared"

ELSEWHERE = {
    "scripts/gate.sh": "makes an environment; the command that it ends in is run here",
    "scripts/gate.sh --profile graphed": "needs GPUs; scripts/gpu_profiles.py runs the gate so",
    "scripts/test.sh": "makes an environment and runs these tests",
    "pip install -e .": "needs a package index; scripts/first_verdict.py does it",
    "tpcompile bench --preset wan14b_8 --nproc 2 --layers 4 --program C:graphed --program my_model.py:build": "2 GPUs",
    "python scripts/bench_peers/run.py --nproc 2 --preset wan14b_8 --layers 4 --json bench.json": "2 GPUs; tests/bench",
    "python scripts/bench_peers/plot.py bench.json bench.svg": "tests/bench/test_plot.py draws committed reports",
    "tpcompile bench --preset wan14b_8 --nproc 2 --layers 4 --write-baseline performance.json": "2 GPUs; tests/bench",
    "tpcompile gate --preset wan14b_8 --nproc 2 --layers 4 --performance performance.json": "2 GPUs; tests/cli",
    "tpcompile tune --nproc 2": "2 GPUs; tests/by_size/test_tune.py",
    "tpcompile verify-win my_model:build": "a minute of CPU for each mode; tests/fusion/test_win.py runs it",
    "tpcompile gate --nproc 8 --mode C": "8 ranks; `tpcompile gate` is run below on 2",
    "torchrun --standalone --nproc-per-node 8 repro/tp_compile_repro.py --mode C": "8 ranks; tests/gate run it on 2",
    "torchrun --standalone --nproc-per-node 2 -m examples.adapters.transformers_plan Qwen3": "tests/adapters runs it",
    "srun --ntasks 2 tpcompile gate --target my_model:build": "Slurm; tests/gate/test_srun.py",
    "sbatch configs/slurm/gate.sbatch my_model:build": "Slurm; tests/nodes/test_launchers.py",
    "tpcompile run --run-dir /shared/run -- srun --ntasks 8 --kill-on-bad-exit python train.py": "Slurm",
    "tpcompile run --run-dir /shared/run -- torchrun --nproc-per-node 8 train.py": "8 ranks; tests/test_watched.py",
    "tpcompile diagnose runs/20261128T092011-run-d64a": "of ranks that were killed; tests/sentinel/test_afterwards.py",
    "TORCH_TRACE=/shared/trace torchrun ... train.py": "any job of a user's; tests/evidence/logs has such traces",
    "tpcompile fusion record my_model:build --nproc 8 --arch sm_90 -o manifest.json": "tests/fusion/test_no_gpu.py",
    "scripts/clients.sh": "makes an environment of 5 GB; tests/test_clients.py has what needs none",
    "scripts/clients.sh -k megatron --clients-out clients.json": "likewise",
    "tpcompile run -- torchrun --nproc-per-node 2 examples/overflow.py": "tests/test_watched.py runs it",
    "tpcompile run --follow my_models -- accelerate launch train.py": "tests/test_watched.py runs torchrun's",
    "tpcompile certify head_norm --import my_kernels": "tests/fastpath/test_documented.py runs it",
}
"""Line -> why it is not run here."""


@dataclass(frozen=True)
class Run:
    """What becomes of a line: a text that it must print, its exit code, and what is smaller here than on the page."""

    says: str
    code: int = 0
    smaller: tuple[str, str] = ("", "")
    is_forked: bool = False
    """It, its torchrun and its ranks have torch already; a line above it starts them as a user does."""


INDUCTOR = ("my_model:build", "my_model:build --set compile.backend=inductor")
"""The project's default is quicker, and has no kernels."""

RUN = {
    "tpcompile gate --json > verdict.json": Run("", smaller=("--json", "--nproc 1 --json")),
    "tpcompile gate --fault get_rank_constant": Run("mul(%0, 1) / mul(%0, 2)", code=1, is_forked=True),
    "tpcompile gate -q": Run("PASS (exit 0): 2 ranks agree", is_forked=True),
    "tpcompile compare runs/pass --json": Run('"exit_code": 0'),
    "tpcompile report runs/20261128T092011-gate-d64a": Run(
        "PASS (exit 0); page: runs/pass/report.html", smaller=("runs/20261128T092011-gate-d64a", "runs/pass")
    ),
    "tpcompile report runs/20261128T092011-run-51ce --perfetto trace.json": Run(
        "trace for ui.perfetto.dev: trace.json", smaller=("runs/20261128T092011-run-51ce", "runs/pass")
    ),
    "tpcompile gate --fault list | grep rank_constant": Run("rank_constant\tThe rank baked in"),
    "tpcompile --version": Run("tpcompile "),
    # The shell stays, as a user's does: it is looked for among what has started the command.
    "tpcompile --install-completion": Run("completion installed", smaller=("completion", "completion && true")),
    "python -m tpcompile gate -h": Run("--fault-rank"),
    "tpcompile diagnose /shared/trace": Run("PASS (exit 0)", smaller=("/shared/trace", str(TRACES))),
    "tpcompile diagnose /shared/trace --ended-badly": Run("exit 6", code=6, smaller=("/shared/trace", str(TRACES))),
    "tpcompile gate --target my_model:build --nproc 2 --set width=128": Run(
        "PASS (exit 0): 2 ranks agree", is_forked=True
    ),
    "torchrun --no-python --nproc-per-node 2 tpcompile gate --target my_model:build": Run(
        "PASS (exit 0): 1 rank", smaller=("--nproc-per-node 2", "--nproc-per-node 1"), is_forked=True
    ),
    "tpcompile typecheck my_model:build --nproc 8 --meta": Run("judged 20 of 32 ops", code=6, is_forked=True),
    "tpcompile dryrun my_model:build --mesh dp=64,tp=16": Run(
        "PASS (exit 0): 6 ranks agree", smaller=("tp=16", "tp=2"), is_forked=True
    ),
    "tpcompile fusion record my_model:build --nproc 8 -o manifest.json": Run(
        "written: manifest.json", smaller=("--nproc 8", "--nproc 2"), is_forked=True
    ),
    "tpcompile fusion show manifest.json --missed 3": Run("launches"),
    "tpcompile fusion explain manifest.json 0 1": Run("shared: buf"),
    "tpcompile fusion bisect my_model:build --nproc 8": Run(
        "as it is: ", smaller=("--nproc 8", "--nproc 2"), is_forked=True
    ),
    "tpcompile fusion diff manifest.json manifest.json": Run("the same kernels with the same code"),
    "tpcompile gate --target my_model:build --run-dir runs/good": Run(
        "PASS (exit 0)", smaller=INDUCTOR, is_forked=True
    ),
    "tpcompile fusion baseline runs/good/rank_0/manifest.json -o fusion.json": Run("written: fusion.json"),
    "tpcompile gate --target my_model:build --fusion-baseline fusion.json": Run(
        "kernels against the baseline: as in the baseline", smaller=INDUCTOR, is_forked=True
    ),
    "tpcompile fusion check runs/good/rank_0/manifest.json --baseline fusion.json": Run("as in the baseline"),
}
"""Line -> how it must end, in the order in which they are run."""
PROGRAMS_OF = {"tpcompile": ("-m", "tpcompile"), "torchrun": TORCHRUN}
"""What a forked line may call. With `--no-python` torchrun starts its ranks as a user's would."""


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """(language, lines) of every block."""
    for language, body in re.findall(r"^```([a-z]*)\n(.*?)^```$", text, re.M | re.S):
        yield language, [line for line in body.splitlines() if line.strip()]


def commands(text: str) -> list[str]:
    """The lines of the bash blocks, without comments."""
    lines = [line for language, body in blocks(text) if language == "bash" for line in body]
    return [line.partition("  #")[0].strip() for line in lines]


def unlabelled(text: str) -> list[str]:
    """First lines of blocks that hold commands and are not called bash."""
    firsts = [body[0] for language, body in blocks(text) if language in ("", "console", "sh", "shell") and body]
    return [line for line in firsts if PROGRAMS.match(line)]


def test_every_line_is_run_or_has_a_reason() -> None:
    found = {line for page in PAGES for line in commands(page.read_text())}
    assert found == {*RUN, *ELSEWHERE}


def test_every_block_of_commands_is_called_bash() -> None:
    assert {page.name: unlabelled(page.read_text()) for page in PAGES} == {page.name: [] for page in PAGES}


def test_a_new_command_is_found_in_either_kind_of_block() -> None:
    assert commands("```bash\ntpcompile gate --new  # why\n```\n") == ["tpcompile gate --new"]
    assert unlabelled("```\ntorchrun train.py\n```\n") == ["torchrun train.py"]
    assert unlabelled("```\ntpcompile gate: cpu_smoke, mode C\n```\n") == []  # what it prints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose defaults make the gate small, with the target of docs/own-model.md and our commands."""
    folder = tmp_path_factory.mktemp("project")
    small = 'device = "cpu"\nset = ["gate.steady_calls=2", "gate.resized_seq_len=16", "compile.backend=aot_eager"]\n'
    (folder / "pyproject.toml").write_text(f"[tool.tpcompile]\n{small}")
    page = (ROOT / "docs" / "own-model.md").read_text()
    (target,) = [body for body in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "def build(ctx)" in body]
    (folder / "my_model.py").write_text(target)
    for name, module in {"tpcompile": "-m tpcompile", "torchrun": "-m torch.distributed.run", "python": ""}.items():
        tool = folder / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        tool.chmod(0o755)
    return folder


def bash(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The line in that project, with a home of its own."""
    command = ["bash", "-o", "pipefail", "-c", line]
    environ = environ_of(folder)
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)


def forked(line: str, folder: Path) -> Ended:
    """The same for a line that is one command of ours."""
    program, *arguments = shlex.split(line)
    assert not {"|", ">"} & set(arguments)
    return run_python([*PROGRAMS_OF[program], *arguments], environ=environ_of(folder), cwd=folder, timeout_s=240)


def environ_of(folder: Path) -> dict[str, str]:
    """Our commands are found, and the home is that project."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(folder), "PYTHONPATH": PYTHONPATH, "SHELL": "/bin/bash"}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", RUN)
def test_it_does_what_the_page_says(line: str, folder: Path) -> None:
    wanted = RUN[line]
    if "runs/pass" in line and not (folder / "runs" / "pass").exists():
        earlier = sorted(folder.glob("runs/*"))
        if not earlier:
            pytest.skip("it compares the run of a line above, whose test was left out")
        shutil.copytree(earlier[-1], folder / "runs" / "pass")
    start = forked if wanted.is_forked else bash
    done = start(line.replace(*wanted.smaller) if wanted.smaller[0] else line, folder)
    assert (done.returncode, wanted.says in done.stdout) == (wanted.code, True), done.stdout + done.stderr
    if line.endswith("> verdict.json"):
        assert Verdict.model_validate(json.loads((folder / "verdict.json").read_text())).exit_code == 0
