"""Manifests recorded on a GPU beside those generated without one: structure, code, registers and shared memory.

    python scripts/fusion_fidelity.py OUT.json                          on a GPU; without one in the same run
    python scripts/fusion_fidelity.py OUT.json --device cpu             a trial: --arch on both sides

Each manifest is made by `tpcompile fusion record` in a process with a cache of its own. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpcompile.fusion.diff import diff
from tpcompile.fusion.manifest import read
from tpcompile.fusion.manifest_records import Launch, Manifest, Role

WITHOUT = ("--arch", "sm_90", "--resources")
CASES = {
    "tp 4, width 64, trained": ("--nproc", "4", "--set", "train=1"),
    "tp 1, width 4096": ("--nproc", "1", "--set", "width=4096", "--set", "hidden=14336"),
    "tp 8, width 4096, 4096 tokens, trained": (
        *("--nproc", "8", "--set", "width=4096", "--set", "hidden=14336"),
        *("--set", "tokens=4096", "--set", "train=1"),
    ),
}
TARGET = "tests.fusion.models:feed_forward"
LIMIT_S = 60


def main() -> None:
    """Record all at once, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    on_gpu = ("--device", "cuda") if args.device == "cuda" else WITHOUT
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: (Path(folder, f"{at}-gpu"), Path(folder, f"{at}-none")) for at, name in enumerate(CASES)}
        started = []
        for name, (with_gpu, without) in sides.items():
            started.append(record(with_gpu, *CASES[name], *on_gpu))
            started.append(record(without, *CASES[name], *WITHOUT))
        errors = [ended(one) for one in started]
        rows = {} if any(errors) else {name: row(*map(read_manifest, both)) for name, both in sides.items()}
    report = {"command": " ".join(sys.argv), "device": args.device, "errors": errors, "cases": rows}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(report)))


def record(folder: Path, *flags: str) -> subprocess.Popen[str]:
    folder.mkdir()
    command = [sys.executable, "-m", "tpcompile", "fusion", "record", TARGET, *flags, "-o", "manifest.json"]
    environ = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]),
    }
    if "--arch" in flags:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.Popen(
        command, cwd=folder, env=environ, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def ended(process: subprocess.Popen[str]) -> str:
    """The last lines of what it wrote where it failed."""
    try:
        _, text = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"not ended within {LIMIT_S} s"
    return text[-800:] if process.returncode else ""


def read_manifest(folder: Path) -> Manifest:
    return read(folder / "manifest.json")


def row(gpu: Manifest, without: Manifest) -> dict[str, Any]:
    change = diff(gpu, without)
    structure = [one for graph in change.graphs for one in (*graph.removed, *graph.added)]
    pairs = list(zip(kernels(gpu), kernels(without), strict=False))
    return {
        "torch": [gpu.torch, without.torch],
        "triton": [gpu.triton, without.triton],
        "settings": [gpu.settings, without.settings],
        "launches that differ": [one.name for one in structure],
        "kernels": len(pairs),
        "hashes of the code": [[first.source, second.source] for first, second in pairs],
        "kernels with different code": [first.name for first, second in pairs if first.source != second.source],
        "resources": [compared(*both) for both in pairs],
    }


def kernels(manifest: Manifest) -> list[Launch]:
    launches = (launch for graph in manifest.graphs for launch in graph.launches)
    return [one for one in launches if one.role is Role.KERNEL]


def compared(gpu: Launch, without: Launch) -> dict[str, Any]:
    """The configurations that both know."""
    known = {one.configuration: one.model_dump(mode="json") for one in without.resources}
    ours = [one.model_dump(mode="json") for one in gpu.resources]
    return {
        "kernel": gpu.name,
        "on the GPU": ours,
        "configurations without one": sorted(known),
        "equal": [one == known.get(one["configuration"]) for one in ours],
        "without one": [known.get(one["configuration"]) for one in ours],
    }


def table(report: dict[str, Any]) -> Iterator[str]:
    yield from filter(None, report["errors"])
    for name, found in report["cases"].items():
        equal = [one for kernel in found["resources"] for one in kernel["equal"]]
        yield (
            f"{name}: {len(found['launches that differ'])} launches differ; code differs in "
            f"{len(found['kernels with different code'])} of {found['kernels']} kernels; resources equal in "
            f"{sum(equal)} of {len(equal)} configurations"
        )
        for kernel in found["resources"]:
            if not all(kernel["equal"]):
                yield f"  {kernel['kernel']}: {kernel['on the GPU']} on the GPU, {kernel['without one']} without one"


if __name__ == "__main__":
    main()
