"""torchrun's environment variables -> rank, device and process group, or one line why not."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tpcompile.errors import ConfigError, PreflightError
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.ranks.store import RankStore


@dataclass(frozen=True)
class RankEnv:
    """Place of this process in the job; `rank` is global and the only identity, `local_rank` only picks a GPU."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def rank_env() -> RankEnv:
    """Read torchrun's variables. Raises ConfigError when one is not set."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing == ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]:
        raise ConfigError(
            f"LOCAL_RANK and LOCAL_WORLD_SIZE are not set for rank {os.environ['RANK']}; set 0 and 1 where a node has "
            "one rank, or start with torchrun"
        )
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set; "
            "start with `torchrun --standalone --nproc-per-node N ...`, srun or `tpcompile gate`"
        )
    return RankEnv(*(int(os.environ[name]) for name in names))


def local_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank when all ranks are on this machine; its agent serves the store at that port."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"local-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def hosted_store(listener: socket.socket) -> dist.TCPStore:
    """The store at the port of a socket that listens already, which it takes over."""
    host, port = listener.getsockname()
    return dist.TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def choose_device(requested: str, env: RankEnv) -> torch.device:
    """`auto`, `cpu`, `cuda` or `one_gpu` -> this rank's device.

    `auto` takes CUDA when there is a GPU for every local rank; with `one_gpu` all ranks share the first, and gloo moves
    what they exchange through the host: graphs, kernels and numbers are those of several GPUs, times are not. Raises
    PreflightError when CUDA is asked for and absent, or when there are more local ranks than GPUs.
    """
    if requested == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "auto" and gpus < env.local_world_size:
        return torch.device("cpu")
    if gpus == 0:
        raise PreflightError(
            "device=cuda, but torch sees no GPU; use --device cpu, or check the driver with nvidia-smi"
        )
    if requested == "one_gpu":
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # kernels of ranks may exchange words
        return torch.device("cuda", 0)
    if env.local_world_size > gpus:
        raise PreflightError(f"{env.local_world_size} ranks on this node but {gpus} GPU(s); start at most {gpus} ranks")
    return torch.device("cuda", env.local_rank)


def check_cpp_compiler(backend: str, device: torch.device) -> None:
    """Inductor on CPU needs a C++ compiler. Raises PreflightError when there is none."""
    if backend != "inductor" or device.type != "cpu":
        return
    from tpcompile.launch import cxx_compiler  # not for every program that imports this module: it prints reports

    try:
        cxx_compiler()
    except PreflightError as error:
        raise PreflightError(f"{error}, or use --set compile.backend=aot_eager") from None


@contextmanager
def process_group(
    env: RankEnv,
    device: torch.device,
    *,
    shares_gpu: bool = False,
    timeout_s: float,
    start_timeout_s: float = 300.0,
    prefix: str = "tpcompile",
) -> Iterator[dist.ProcessGroup]:
    """The default process group, destroyed on the way out without a barrier: NCCL, or gloo on CPU and a shared GPU.

    A process that makes several in sequence gives each its own `prefix`: the store still holds the addresses of the
    previous one. Raises PreflightError naming the ranks that do not start within `start_timeout_s`.
    """
    has_own_gpu = device.type == "cuda" and not shares_gpu
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(dist.rendezvous("env://", env.rank, env.world_size, timeout=timeout))
    place = {"rank": env.rank, "world_size": env.world_size}
    started = RankStore(dist.PrefixStore(prefix, store), **place)
    missing = started.wait_for_ranks("started", timeout_s=start_timeout_s)
    if missing:
        raise PreflightError(f"{named_ranks(missing)} did not start within {start_timeout_s:g} s; see its own output")
    dist.init_process_group(
        "nccl" if has_own_gpu else "gloo",
        store=dist.PrefixStore(prefix, store),
        **place,
        timeout=timeout,
        device_id=device if has_own_gpu else None,
    )
    try:
        world = dist.group.WORLD
        assert world is not None, "init_process_group left no default group"
        yield world
    finally:
        if dist.is_initialized():  # a program of the user's may have destroyed it
            dist.destroy_process_group()
