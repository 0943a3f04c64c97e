"""Two small TP programs on two gloo ranks -> `traces/torch-VERSION/PROGRAM_rank_N.log`, as TORCH_TRACE writes them.

Run once per torch version, from the repository's root; both venvs are made by scripts/test.sh:

    .venv/bin/python -m tests.data.record_traces
    PYTHONPATH=. .venv-2.11/bin/python -m tests.data.record_traces

Only the events our parser reads are kept, and paths of this machine are rewritten to /app and /site-packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile.collectives import all_reduce
from tpcompile.evidence.compiles.events import CACHE_EVENTS, event
from tpcompile.evidence.compiles.shapes import BACKWARD_METRICS, FILE_EVENTS
from tpcompile.testing import run_on_ranks

HERE = Path(__file__).resolve().parent
METRICS = (
    "fail_type", "fail_reason", "co_name", "co_filename", "co_firstlineno", "stack_trace", "recompile_reason",
    "restart_reasons", "graph_op_count", "guard_count", "aot_autograd_cumulative_compile_time_us",
    "inductor_cumulative_compile_time_us", "aotautograd_local_cache_hit_count", "inductor_fx_local_cache_hit_count",
)  # fmt: skip
LOG_LINE = re.compile(r"^([A-Z]\d{4} [\d:.]+ )\d+( .*?\] )(\{.*\})$")


class Mixed(nn.Module):
    """Vocabulary-sharded lookup with the shard's start in a buffer; `scale` is the constant that may differ."""

    def __init__(self, rank: int, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.scale = nn.Parameter(torch.randn(8, 4)), scale
        self.register_buffer("start", torch.tensor(8 * rank))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [6] -> [6, 4], summed over ranks."""
        local = tokens - self.start
        outside = (local < 0) | (local >= 8)
        rows = self.weight[local.masked_fill(outside, 0)] * ~outside[:, None]
        y = all_reduce(rows, group=dist.group.WORLD, dst="I")
        return y * self.scale


def program(name: str, caches: str) -> None:
    """Forward and backward of one program on this rank."""
    rank = dist.get_rank()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(caches, name, str(rank)))
    torch._inductor.config.compile_threads = 1
    model = Mixed(rank, scale=0.5 if name == "healthy" else 0.5 * (rank + 1))
    torch.compile(model, fullgraph=True)(torch.arange(0, 12, 2)).sum().backward()


def record(name: str, folder: Path) -> None:
    """Run one program and keep what its ranks traced."""
    with tempfile.TemporaryDirectory() as work:
        os.environ["TORCH_TRACE"] = str(Path(work, "trace"))
        run_on_ranks(program, name, work)
        for rank in range(2):
            (path,) = Path(work, "trace").glob(f"*_rank_{rank}_*")
            (folder / f"{name}_rank_{rank}.log").write_text(cleaned(path.read_text(), work))


def cleaned(text: str, work: str) -> str:
    """The events we read, without this machine."""
    kept: list[tuple[str, dict[str, Any], str | None]] = []
    for block in re.split(r"\n(?!\t)", text.rstrip("\n")):
        first, *payload = block.split("\n\t")
        if not (match := LOG_LINE.match(first)):
            continue
        metadata = json.loads(neutral(match[3], work))
        body = neutral("\n".join(payload), work) if payload else None
        found = event(metadata, body, wanted=FILE_EVENTS)
        if found is None:
            continue
        if found.name in CACHE_EVENTS:  # 60 kB of key
            body = None
            metadata.pop("has_payload", None)
        for name in {"compilation_metrics", BACKWARD_METRICS} & metadata.keys():  # dozens of timings and settings
            metrics = metadata[name]
            metadata[name] = {key: metrics[key] for key in METRICS if key in metrics}
        if body is not None:
            metadata["has_payload"] = hashlib.md5(body.encode(), usedforsecurity=False).hexdigest()
        kept.append((f"{match[1]}1{neutral(match[2], work)}", metadata, body))
    used = {f["filename"] for _, m, _ in kept if "dynamo_start" in m for f in m["dynamo_start"]["stack"]}
    kept = [(prefix, m, body) for prefix, m, body in kept if "str" not in m or m["str"][1] in used]
    return "".join(_lines(*entry) for entry in kept)


def neutral(text: str, work: str) -> str:
    """Text without the paths of this machine."""
    text = text.replace(work, "/tmp/work").replace(str(HERE.parent.parent), "/app")
    return re.sub(r"[^\s\"'<>(]*/(site-packages|lib/python3\.\d+)/", r"/\1/", text)


def _lines(prefix: str, metadata: dict[str, Any], body: str | None) -> str:
    payload = "" if body is None else "".join(f"\n\t{line}" for line in body.split("\n"))
    return f"{prefix}{json.dumps(metadata)}{payload}\n"


def main() -> None:
    """Record both programs with the torch that runs this."""
    folder = HERE / "traces" / f"torch-{torch.__version__.partition('+')[0]}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("healthy", "rank_constant"):
        record(name, folder)


if __name__ == "__main__":
    main()
