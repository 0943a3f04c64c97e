"""A healthy program and drawn parameters -> its run on this rank: groups, data and steps, watched by sentinels."""

# B batch, S sequence, D model width, f = hidden width / tp
from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.faults.case import F, Planted, add, described
from tests.faults.context import join_group
from tpcompile.collectives import all_reduce, copy_to_tp
from tpcompile.sentinel import Sentinel

WIDTHS = (16, 32, 48)
_JITTER_S = 0.03


@dataclass(frozen=True)
class Draw:
    """What varies between runs of a program; the same on all ranks."""

    program: str
    backend: str = "aot_eager"
    nproc: int = 2
    train: bool = False
    steps: int = 4
    seed: int = 0
    width: int = 16
    batch: int = 2
    tokens: int = 8
    sentinels: int = 1
    """Sentinels of the process, one after the other, each over a whole run of the program."""
    slow_rank: int = -1
    """This rank pauses once between two steps; -1 for none."""
    slow_s: float = 4.0
    hang_after_s: float = 3.0

    def to_json(self) -> str:
        """For the command line of a rank."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Program(Planted):
    """One healthy program and what may be drawn for it."""

    is_drawn: ClassVar[bool] = True
    limit_s: float = 180.0
    backends: tuple[str, ...] = ("inductor", "aot_eager")
    sizes: tuple[int, ...] = (2,)
    """Numbers of ranks."""
    trains: tuple[bool, ...] = (False, True)
    dp: int = 1
    """Size of the data-parallel axis."""
    compiles_differ: bool = False
    """By its nature ranks compile a different number of times."""
    can_repeat: bool = True
    """May run twice in a process."""
    prepare: Callable[[Run], Any] | None = None
    """What the process does before there is a sentinel; the program finds the result in `run.prepared`."""
    is_clean: bool = True
    """False for a negative control: it diverges, and a run of it must be an alarm."""

    def first_draw(self) -> Draw:
        """Parameters of a run of this program alone, with a backend that compiles in a moment where it takes one."""
        backend = "aot_eager" if "aot_eager" in self.backends else self.backends[0]
        return self.draw(0, backend=backend, slow=False, nproc=self.world_size)

    def draw(self, seed: int, *, backend: str, slow: bool, nproc: int = 0, most: int = 8) -> Draw:
        """Parameters; equal seeds and backends give equal compiles, `slow` decides only how ranks part in time.

        `nproc` ranks when it is given, else one of the program's sizes up to `most`.
        """
        rng = random.Random(f"{self.name} {seed}")
        nproc = nproc or rng.choice([size for size in self.sizes if size <= most])
        return Draw(
            program=self.name,
            backend=backend,
            nproc=nproc,
            train=rng.choice(self.trains),
            steps=rng.choice((4, 5, 6)),
            seed=rng.randrange(1 << 20),
            width=rng.choice(WIDTHS),
            batch=rng.choice((1, 2, 3)),
            tokens=8 * rng.choice((1, 2, 3)),
            sentinels=2 if self.can_repeat and rng.random() < 0.2 else 1,
            slow_rank=rng.randrange(nproc) if slow else -1,
            hang_after_s=rng.choice((1.0, 3.0)),
        )


def program(*, sizes: tuple[int, ...] = (2,), **fields: Any) -> Callable[[F], F]:
    """Declare a healthy program; `fields` are those of `Program`."""

    def declare(body: F) -> F:
        described_by = described(body) | {"cause": None, "world_size": sizes[0]}
        add(Program(program=body, sizes=sizes, **described_by, **fields))
        return body

    return declare


def play(program: Program, draw: Draw, *, rank: int, run_dir: Path) -> None:
    """Run the program on this rank under the sentinels that were drawn; what they saw goes to run_dir/rank_N.json."""
    torch.set_num_threads(1)
    device = join_group(rank, draw.nproc)
    try:
        found = _watched(program, draw, device=device, run_dir=run_dir)
        print(f"rank {rank}: {json.dumps(found['stats'])}", flush=True)
        (run_dir / f"rank_{rank}.json").write_text(json.dumps(found))
    finally:
        torch.compiler.reset()  # NCCL does not let go of a group while CUDA graphs hold its collectives
        gc.collect()
        dist.destroy_process_group()


def _watched(program: Program, draw: Draw, *, device: torch.device, run_dir: Path) -> dict[str, Any]:
    mesh = init_device_mesh(device.type, (program.dp, draw.nproc // program.dp), mesh_dim_names=("dp", "tp"))
    warnings: list[str] = []
    logger.enable("tpcompile")
    logger.add(lambda message: warnings.append(message.record["message"]), level="WARNING")
    found: dict[str, Any] = {
        "compiles": 0, "findings": [], "stopped_watching": [], "warnings": warnings, "stats": [], "domain": "",
    }  # fmt: skip
    run = Run(draw, mesh)
    run.prepared = program.prepare(run) if program.prepare else None
    for number in range(draw.sentinels):
        sentinel = Sentinel(mesh=mesh, axis="tp", run_dir=run_dir / f"verdict_{number}", hang_after_s=draw.hang_after_s)
        with sentinel as run.sentinel:
            program.program(run)
            if not sentinel.is_active:
                found["stopped_watching"].append(
                    sentinel.protocol.stopped_because or "the sentinel was not active at the end"
                )
        found["compiles"] += sentinel.stats["compiles"]
        found["findings"] += [verdict.summary for verdict in sentinel.findings]
        found["stats"].append(dict(sentinel.stats))
        found["domain"] = sentinel.domain
    return found


class Run:
    """One run of a program on this rank: what it draws its data from and where it communicates."""

    def __init__(self, draw: Draw, mesh: DeviceMesh) -> None:
        self.draw, self.mesh = draw, mesh
        self.device = torch.device(
            mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None
        )
        self.rank = dist.get_rank()
        self.group: dist.ProcessGroup = mesh.get_group("tp")
        self.tp_rank, self.tp = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.dp_rank = mesh.get_local_rank("dp") if "dp" in (mesh.mesh_dim_names or ()) else 0
        self.sentinel: Sentinel
        self.prepared: Any = None
        self._has_paused = False

    def compile(self, target: Any, **options: Any) -> Any:
        """torch.compile with the backend drawn."""
        return torch.compile(target, **({"backend": self.draw.backend} | options))

    def steps(self) -> Iterator[int]:
        """Step numbers; ranks come apart between them, one of them by seconds when it is slow."""
        for step in range(self.draw.steps):
            yield step
            time.sleep(_JITTER_S * ((self.rank + step) % 3))
            if self.rank == self.draw.slow_rank and step == self.draw.seed % 2 and not self._has_paused:
                self._has_paused = True
                time.sleep(self.draw.slow_s)

    def data(self, step: int, *shape: int) -> Tensor:
        """Normal numbers, equal on the ranks of one tensor-parallel group."""
        generator = torch.Generator().manual_seed(1000 * self.draw.seed + 10 * step + self.dp_rank)
        shape = shape or (self.draw.batch, self.draw.tokens, self.draw.width)
        return torch.randn(shape, generator=generator).to(self.device)

    def ids(self, step: int, *shape: int, vocabulary: int) -> Tensor:
        """Token numbers, equal on all ranks."""
        generator = torch.Generator().manual_seed(self.draw.seed + step)
        return torch.randint(vocabulary, shape, generator=generator).to(self.device)

    def mlp(self, **options: Any) -> TinyMLP:
        """A sharded MLP of the width drawn."""
        return TinyMLP(self.group, self.draw.width, **options).to(self.device)

    def advance(self, program: Any, optimizer: torch.optim.Optimizer | None, *inputs: Any) -> Tensor:
        """One call; with a backward pass and an optimizer step when training was drawn."""
        with torch.set_grad_enabled(self.draw.train):
            y: Tensor = program(*inputs)
            if self.draw.train:
                y.square().mean().backward()
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
        return y.detach()


class TinyMLP(nn.Module):
    """Column then row parallel, with a residual: one all-reduce forward, one backward."""

    def __init__(self, group: dist.ProcessGroup, width: int, *, hidden: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.group = group
        rank, tp = dist.get_rank(group), dist.get_world_size(group)
        generator = torch.Generator().manual_seed(seed)
        hidden = hidden or 2 * width
        up_FD = torch.randn(hidden, width, generator=generator) * width**-0.5
        down_DF = torch.randn(width, hidden, generator=generator) * hidden**-0.5
        self.up_fD = nn.Parameter(up_FD.chunk(tp)[rank].clone())
        self.down_Df = nn.Parameter(down_DF.chunk(tp, 1)[rank].clone())

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[..., D] -> [..., D], replicated."""
        h = torch.relu(copy_to_tp(x_BSD, group=self.group) @ self.up_fD.t())
        return x_BSD + all_reduce(h @ self.down_Df.t(), group=self.group)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of programs that do not ask for a different one."""
    return torch.optim.SGD(module.parameters(), lr=1e-3)
