"""What two gloo ranks do in the preflight tests: scenarios by name, each in a clean state, their verdicts as JSON."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import DivergenceError
from tpcompile.nn.linear import ColumnParallelLinear
from tpcompile.preflight import Handshake, InputCheck, check_setup, fact_exchange
from tpcompile.preflight.facts import SetupDigest
from tpcompile.ranks import exchange as dist_exchange
from tpcompile.ranks.store import RankStore

WAIT_S = 20.0


def broadcast_from_0(x: torch.Tensor) -> torch.Tensor:
    dist.broadcast(x, 0)
    return x


class Block(nn.Module):
    """A column shard and a norm, plain tensors."""

    def __init__(self, rows: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.full((rows, 3), float(dist.get_rank())))
        self.norm = nn.Parameter(torch.arange(200.0).view(20, 10))
        self.register_buffer("frequencies", torch.linspace(0, 1, 5, dtype=torch.float64))


class Ranks:
    """This rank, its store and mesh, and the scenarios."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.is_odd = self.rank == 1
        self.store = dist.distributed_c10d._get_default_store()
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def check(self, module: nn.Module | None = None, **options: Any) -> str:
        """One handshake of all ranks."""
        options = {"mesh": self.mesh, "store": self.store, "timeout_s": WAIT_S} | options
        return check_setup(module, **options).to_json()

    def odd(self, context: Any) -> Any:
        """The context on rank 1, nothing on the others."""
        return context if self.is_odd else nullcontext()

    # Scenarios: environment.

    def clean(self) -> str:
        """Everything that differs by nature differs."""
        own = {"TORCHINDUCTOR_CACHE_DIR": f"/tmp/cache{self.rank}", "PYTHONHASHSEED": str(self.rank),
               "LOCAL_RANK": str(self.rank), "TRITON_CACHE_DIR": f"/tmp/triton{self.rank}"}  # fmt: skip
        with mock.patch.dict(os.environ, own), mock.patch.object(socket, "gethostname", lambda: f"node{self.rank}"):
            return self.check(Block(), sharded=["up"], resolved={"attention": "flash"})

    def version(self) -> str:
        """A different version of torch on rank 1."""
        with self.odd(mock.patch.object(torch, "__version__", "9.9")):
            return self.check()

    def variable(self) -> str:
        """A compile variable on rank 1 only."""
        with self.odd(mock.patch.dict(os.environ, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"})):
            return self.check()

    def declared_variable(self) -> str:
        """The same, allowed."""
        allowed = [("environment", "TORCHINDUCTOR_MAX_AUTOTUNE", "rank 1 tunes for all")]
        with self.odd(mock.patch.dict(os.environ, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"})):
            return self.check(allow=allowed)

    def setting(self) -> str:
        """A patched Inductor config."""
        with self.odd(torch._inductor.config.patch(epilogue_fusion=False)):
            return self.check()

    def precision(self) -> str:
        """A different matmul precision on rank 1."""
        with restored_precision():
            if self.is_odd:
                torch.set_float32_matmul_precision("high")
            return self.check()

    def attention(self) -> str:
        """SDPA uses a different backend for the same tensors."""
        with self.odd(sdpa_kernel(SDPBackend.MATH)):
            return self.check()

    def named_backend(self) -> str:
        """`auto` of the user's own became something else."""
        return self.check(resolved={"attention": lambda: "math" if self.is_odd else "flash"})

    def failing_resolver(self) -> str:
        """The package is missing on rank 1."""

        def ask() -> str:
            if self.is_odd:
                raise ImportError("no module named flash_attn")
            return "flash"

        return self.check(resolved={"attention": ask})

    def autocast(self) -> str:
        """Autocast on one rank."""
        with self.odd(torch.autocast("cpu", torch.bfloat16)):
            return self.check()

    def topology(self) -> str:
        """Rank 1 has the mesh the other way round."""
        return self.check(mesh=DeviceMesh("cpu", [1, 0], mesh_dim_names=("tp",)) if self.is_odd else self.mesh)

    # Scenarios: weights.

    def parameter_dtype(self) -> str:
        """bfloat16 on rank 1."""
        return self.check(Block().bfloat16() if self.is_odd else Block(), sharded=["up"])

    def replicated_bit(self) -> str:
        """One element of a replicated weight is one bit off."""
        block = Block()
        if self.is_odd:
            block.norm.data.view(torch.int32)[13, 7] ^= 1
        return self.check(block, sharded=lambda name, tensor: name == "up")

    def broadcast_weight(self) -> str:
        """The same, and the weight is broadcast from rank 0."""
        block = Block()
        if self.is_odd:
            block.norm.data.view(torch.int32)[13, 7] ^= 1
        dist.broadcast(block.norm.data, 0)
        return self.check(block, sharded=lambda name, tensor: name == "up")

    def replicated_buffer(self) -> str:
        """Minus zero instead of zero."""
        block = Block()
        if self.is_odd:
            block.frequencies[0] = -0.0
        return self.check(block, sharded=["up"])

    def nobody_said(self) -> str:
        """The shards differ, and nothing says that they are shards."""
        return self.check(Block())

    def dtensor_on_one_rank(self) -> str:
        """The norm was distributed on rank 1 only; its bits are equal."""
        block = Block()
        if self.is_odd:
            norm = DTensor.from_local(block.norm.detach(), self.mesh, [Replicate()], run_check=False)
            block.norm = nn.Parameter(norm)
        return self.check(block)

    def missing_parameter(self) -> str:
        """Rank 1 has a bias too."""
        block = Block()
        if self.is_odd:
            block.bias = nn.Parameter(torch.zeros(3))
        return self.check(block, sharded=["up"])

    def uneven_undeclared(self) -> str:
        """Shards of 4 and 3 rows, no full shape."""
        return self.check(Block(rows=4 - self.rank), sharded=["up"])

    def uneven_declared(self) -> str:
        """The same with the full shape."""
        return self.check(Block(rows=4 - self.rank), sharded={"up": (7, 3)})

    def lost_rows(self) -> str:
        """Equal shards that do not make up the full tensor."""
        return self.check(Block(rows=3), sharded={"up": (7, 3)})

    def dtensor(self, *, drift: bool = False) -> str:
        """An unevenly sharded and a replicated DTensor."""
        module = nn.Module()
        module.up = nn.Parameter(distribute_tensor(torch.ones(5, 3), self.mesh, [Shard(0)]))
        local = torch.ones(4) + (1.0 if drift and self.is_odd else 0.0)
        module.norm = nn.Parameter(DTensor.from_local(local, self.mesh, [Replicate()], run_check=False))
        return self.check(module)

    def dtensor_drift(self) -> str:
        """A replicated DTensor that is not."""
        return self.dtensor(drift=True)

    def own_module(self, *, rows: int = 8) -> str:
        """A module with `shard_specs`, shards with other numbers on each rank."""
        linear = ColumnParallelLinear(4, rows, bias=True, comm=Collectives(self.mesh.get_group("tp")))
        for parameter in linear.parameters():
            nn.init.constant_(parameter, float(self.rank))
        return self.check(linear)

    def own_module_other_size(self) -> str:
        """A different out_features on rank 1."""
        return self.own_module(rows=16 if self.is_odd else 8)

    # Scenarios: over time.

    def recheck(self) -> dict[str, str]:
        """Untouched, written on all ranks, written on rank 1."""
        block = Block()
        handshake = Handshake(
            block, mesh=self.mesh, store=self.store, timeout_s=WAIT_S, sharded=["up"], frozen=True
        )  # fmt: skip
        found = {"first": handshake.check().to_json(), "untouched": handshake.recheck().to_json()}
        block.norm.data += 1
        found["on all ranks"] = handshake.recheck().to_json()
        if self.is_odd:
            block.up.data[2, 1] += 1e-3
        return found | {"on one rank": handshake.recheck(step=7).to_json()}

    # Scenarios: inputs.

    def inputs(self) -> dict[str, str]:
        """Calls of one `InputCheck`, rank 1 differing in one thing each."""
        inputs, odd = InputCheck(mesh=self.mesh, store=self.store, timeout_s=WAIT_S, sharded=["local*"]), self.is_odd
        x, y = torch.arange(20000.0).view(100, 200), torch.ones(3)
        perturbed = x.clone()
        if self.rank == 0:
            perturbed[61, 3] = 0.5
        nan = torch.tensor([0x7FC00000 + self.rank], dtype=torch.int32).view(torch.float32)
        batch = {"tokens": [x, 3], "scale": 2.5 if odd else 2.0}
        calls: dict[str, Callable[[], Any]] = {
            "equal": lambda: inputs.check(x, {"a": [y, 1]}, mask=None, step=1),
            "value": lambda: inputs.check(y, perturbed, perturbed + 1, step=5),
            "broadcast": lambda: inputs.check(y, broadcast_from_0(perturbed), step=6),
            "nan payload": lambda: inputs.check(nan),
            "stride": lambda: inputs.check(mask=x.t().contiguous().t() if odd else x),
            "shape": lambda: inputs.check(x[: 99 + self.rank]),
            "dtype": lambda: inputs.check(y.double() if odd else y),
            "number": lambda: inputs.check(batch=batch),
            "gradient": lambda: inputs.check(y.clone().requires_grad_(odd)),
            "missing argument": lambda: inputs.check(y, **({"extra": y} if odd else {})),
            "shard": lambda: inputs.check(x, local_x=y + self.rank),
            "step": lambda: inputs.check(y, step=3 + self.rank),
        }
        return {name: call().to_json() for name, call in calls.items()}

    # Scenarios: ranks that do not come; each on a store of its own, because the ranks count their calls apart.

    def absent(self) -> str:
        """Rank 1 never comes."""
        if self.is_odd:
            return ""
        return self.check(timeout_s=0.5)

    def absent_judge(self) -> str:
        """Rank 0 never comes."""
        if not self.is_odd:
            return ""
        return self.check(store=dist.PrefixStore("absent judge", self.store), timeout_s=0.5)

    def died_on_the_way(self) -> str:
        """Rank 1 says that it hashes its weights, and is never heard of again."""
        store = dist.PrefixStore("died", self.store)
        handshake = Handshake(mesh=self.mesh, store=store, timeout_s=5.0 if self.is_odd else 2.0)
        if self.is_odd:
            handshake._exchanges.publish_state("taking fingerprints of the weights")
            fact_exchange._num_exchanges[handshake._exchanges._name] += 1
            return ""
        RankStore(store, rank=0, world_size=2).get("tpcompile/preflight/seen/1", str, timeout_s=WAIT_S)
        return handshake.check().to_json()

    def silent_judge(self) -> str:
        """Rank 0 publishes its digest and stops."""
        store = dist.PrefixStore("silent", self.store)
        handshake = Handshake(mesh=self.mesh, store=store, timeout_s=0.5)
        name = handshake._exchanges._name
        if not self.is_odd:
            digest = SetupDigest(rank=0, domain="tp 0-1", shas={}).model_dump(mode="json")
            handshake._exchanges._root.put(f"{name}/{fact_exchange._num_exchanges[name]}/digest/0", digest)
            fact_exchange._num_exchanges[name] += 1
            return ""
        RankStore(store, rank=1, world_size=2).get(
            f"tpcompile/preflight/{name}/{fact_exchange._num_exchanges[name]}/digest/0", JsonValue, timeout_s=WAIT_S
        )
        with mock.patch.object(dist_exchange, "_DETAIL_TIMEOUT_S", 0.2):
            try:
                return handshake.check().to_json()
            except DivergenceError as error:
                return str(error)

    def silent_answerer(self) -> str:
        """Rank 1 publishes its digest and does not answer."""
        store = dist.PrefixStore("mute", self.store)
        options = {"mesh": self.mesh, "store": store, "timeout_s": 5.0}
        if self.is_odd:
            with mock.patch.dict(os.environ, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}), ExitStack() as stack:
                stack.enter_context(mock.patch.object(dist_exchange.Exchange, "_answer", lambda *_: None))
                try:
                    return check_setup(None, **options).to_json()
                except DivergenceError as error:
                    return str(error)
        with mock.patch.object(dist_exchange, "_DETAIL_TIMEOUT_S", 0.2):
            return check_setup(None, **options).to_json()


SCENARIOS = (
    "clean", "version", "variable", "declared_variable", "setting", "precision", "attention", "named_backend",
    "failing_resolver", "autocast", "topology", "parameter_dtype", "dtensor_on_one_rank", "replicated_bit",
    "broadcast_weight",
    "replicated_buffer", "nobody_said", "missing_parameter", "uneven_undeclared", "uneven_declared", "lost_rows",
    "dtensor", "dtensor_drift", "own_module", "own_module_other_size", "recheck", "inputs", "absent", "absent_judge",
    "died_on_the_way", "silent_judge", "silent_answerer",
)  # fmt: skip


def run() -> dict[str, Any]:
    """All scenarios on this rank."""
    os.environ.pop("TORCHINDUCTOR_MAX_AUTOTUNE", None)
    ranks = Ranks()
    return {name: getattr(ranks, name)() for name in SCENARIOS}


@contextmanager
def restored_precision() -> Iterator[None]:
    """The matmul precision as it was."""
    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
