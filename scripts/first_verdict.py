"""A new user's first verdict: fresh environment, transformers Llama, the lines of the README -> seconds, as JSON.

    python scripts/first_verdict.py [--out results/first_verdict_cpu.json]

The time runs from the end of pip to the verdict of a torchrun of two gloo ranks with a cold cache, which loads the
model with `tp_plan="auto"`, compiles it and trains one step. The goal is 5 minutes and 5 lines. Exit status 0 when the
verdict was green and printed in time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
INSTALL_LIMIT_S, RUN_LIMIT_S, ASKED_S = 900.0, 600.0, 300.0
PACKAGES = ("torch", "transformers", "accelerate")

MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128, max_position_embeddings=64)
LlamaForCausalLM(config).save_pretrained("llama")
"""
PROGRAM = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
model = AutoModelForCausalLM.from_pretrained("llama", distributed_config=DistributedConfig(tp_plan="auto"))
model = torch.compile(model)
batch = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(0))


def step(batch):
    model(input_ids=batch, labels=batch, use_cache=False).loss.backward()


"""


def readme_lines() -> str:
    """The block below "Your own model"."""
    section = (ROOT / "README.md").read_text().partition("## Your own model")[2]
    return section.partition("```python\n")[2].partition("```")[0]


def pinned_torch() -> str:
    """The torch that scripts/test.sh installs."""
    found = re.search(r'DEFAULT_TORCH="(.*)"', (ROOT / "scripts" / "venv.sh").read_text())
    assert found is not None, "scripts/venv.sh names no torch"
    return found[1]


def install(folder: Path) -> tuple[Path, float]:
    """(folder of its commands, seconds) of a new environment with what README and transformers ask for."""
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_LIMIT_S)
    commands = folder / "bin"
    wanted = [pinned_torch(), *PACKAGES[1:], "-e", str(ROOT)]
    subprocess.run([commands / "pip", "install", "--quiet", *wanted], check=True, timeout=INSTALL_LIMIT_S)
    return commands, time.monotonic() - start_s


def first_run(commands: Path, folder: Path) -> tuple[str, float]:
    """(what it printed, seconds) of the program; a run that does not end is killed at the limit."""
    start_s = time.monotonic()
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    subprocess.run([commands / "python", "-c", MODEL], check=True, cwd=folder, timeout=RUN_LIMIT_S)
    (folder / "train.py").write_text(PROGRAM + readme_lines())
    run = [commands / "torchrun", "--standalone", "--nproc-per-node", "2", "train.py"]
    limited = ["timeout", "--kill-after=15", str(RUN_LIMIT_S), *run]
    done = subprocess.run(
        limited, cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.stdout, time.monotonic() - start_s


def versions(commands: Path) -> dict[str, str]:
    """Of what was installed."""
    code = f"from importlib.metadata import version as v; print(*map(v, {PACKAGES}))"
    found = subprocess.run([commands / "python", "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(PACKAGES, found, strict=True))


def main() -> int:
    """Install, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        commands, install_s = install(folder / "venv")
        text, run_s = first_run(commands, folder)
        found = versions(commands)
    verdicts = [line for line in text.splitlines() if line.startswith(("PASS (exit", "FAIL (exit"))]
    row = {
        "command": " ".join(["python", *sys.argv]),
        **found,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "lines of the user": len([line for line in readme_lines().splitlines() if line.strip()])
        - 1,  # `step` is theirs
        "install_s": round(install_s, 1),
        "first verdict_s": round(run_s, 1),
        "lines printed": text.count("\n"),
        "verdict": verdicts[-1] if verdicts else text[-2000:],
    }
    print(json.dumps(row, indent=1))
    if args.out:
        args.out.write_text(json.dumps(row, indent=1) + "\n")
    return int(not (row["verdict"].startswith("PASS") and run_s <= ASKED_S))


if __name__ == "__main__":
    sys.exit(main())
