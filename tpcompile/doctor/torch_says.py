"""torch, asked in a child process -> findings; one that does not answer is a finding, too."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel, ValidationError

from tpcompile.doctor.finding import Finding, fail, warn
from tpcompile.evidence.iterables import grouped

CHILD = (sys.executable, "-m", "tpcompile.preflight.machine")
TIMEOUT_S = 90.0
"""Importing torch takes seconds, from a cold network file system a minute."""
_TOOL_TIMEOUT_S = 20.0
_NO_ANSWER = "torch"


class Answer(BaseModel):
    """What `preflight.machine` prints."""

    torch: str
    untested: str
    """What to warn of on this version; empty on a tested one."""
    cuda: str
    """CUDA version of the build; empty for one without."""
    triton: str
    gpus: tuple[str, ...]
    nccl: str
    """Empty without a GPU."""
    backends: tuple[str, ...]
    """Backends of torch.distributed in this build."""
    no_peer_access: tuple[tuple[int, int], ...]


def ask(command: Sequence[str] = CHILD, timeout_s: float = TIMEOUT_S) -> Answer | Finding:
    """The answer, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        todo = "try `python -c 'import torch; torch.cuda.is_available()'` and `nvidia-smi`: a driver or a disk hangs"
        return fail(_NO_ANSWER, f"no answer within {timeout_s:g} s", todo)
    except OSError as error:
        return fail(_NO_ANSWER, f"{command[0]} cannot be started: {error.strerror}", "install torch for this Python")
    if done.returncode != 0:
        code, (*_, last) = done.returncode, done.stderr.strip().splitlines() or ["no output"]
        how = f"it ended with exit code {code}" if code >= 0 else f"it was ended by signal {-code}"
        return fail(_NO_ANSWER, f"{how}: {last}", "pip install torch")
    try:
        return Answer.model_validate_json(done.stdout.strip().rpartition("\n")[2])
    except ValidationError:
        return fail(_NO_ANSWER, f"no answer but {done.stdout[-200:]!r}", "report this as a bug of tpcompile")


def findings(answer: Answer, environ: Mapping[str, str]) -> Iterator[Finding]:
    """The lines about torch, Triton, GPUs and what connects them."""
    build = f"CUDA {answer.cuda}" if answer.cuda else "no CUDA"
    if answer.untested:
        yield warn("torch", f"{answer.torch}, {build}; {answer.untested}", "install a tested version")
    else:
        yield Finding(name="torch", says=f"{answer.torch}, {build}")
    yield _triton(answer)
    yield _backends(answer)
    yield from _gpus(answer, environ)


def _triton(answer: Answer) -> Finding:
    if answer.triton and answer.triton != "none":
        return Finding(name="triton", says=answer.triton)
    if answer.gpus:
        return fail("triton", "not installed; Inductor needs it on a GPU", "pip install triton")
    return Finding(name="triton", says="not installed; not needed on a CPU")


def _backends(answer: Answer) -> Finding:
    needed = "nccl" if answer.gpus else "gloo"
    says = f"torch.distributed has {', '.join(answer.backends) or 'no backend'}"
    if needed in answer.backends:
        return Finding(name="backends", says=f"{says}{f'; NCCL {answer.nccl}' if answer.nccl else ''}")
    return fail("backends", f"{says}, not {needed}", "install a build of torch that has it")


def _gpus(answer: Answer, environ: Mapping[str, str]) -> Iterator[Finding]:
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if not answer.gpus:
        yield _no_gpus(answer, driver, environ)
        return
    counts = grouped(answer.gpus, lambda gpu: gpu)
    yield Finding(name="GPUs", says=", ".join(f"{len(alike)} x {gpu}" for gpu, alike in counts.items()))
    if driver:
        yield Finding(name="driver", says=driver.splitlines()[0])
    if len(answer.gpus) > 1:
        yield _peers(answer)


def _no_gpus(answer: Answer, driver: str, environ: Mapping[str, str]) -> Finding:
    if not driver:
        return Finding(name="GPUs", says="none; ranks run on the CPU with gloo")
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not hidden.strip("-1, "):
        return warn("GPUs", f"hidden by CUDA_VISIBLE_DEVICES={hidden}", "unset it to run on GPUs")
    build = f"is built for CUDA {answer.cuda}" if answer.cuda else "is a CPU build"
    says = (
        f"nvidia-smi lists {len(driver.splitlines())}, torch sees none: it {build}, the driver is {driver.split()[0]}"
    )
    return warn("GPUs", says, "install a build of torch that fits the driver")


def _peers(answer: Answer) -> Finding:
    """Whether the GPUs read each other's memory, and over what."""
    links = sorted(set(re.findall(r"\bNV\d+\b", _output("nvidia-smi", "topo", "-m"))))
    over = f"NVLink ({', '.join(links)})" if links else "no NVLink"
    if not answer.no_peer_access:
        return Finding(name="peer access", says=f"between all GPUs; {over}")
    pairs = ", ".join(f"{one} to {other}" for one, other in answer.no_peer_access[:4])
    says = f"missing for {len(answer.no_peer_access)} pairs of GPUs ({pairs}); {over}"
    return warn("peer access", says, "NCCL goes through host memory: look for ACS in the BIOS, or a container's limits")


def _output(*command: str) -> str:
    """What a tool prints; empty where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
