"""This process -> `RankFacts`: the facts of one rank, by group; ranks publish only hashes of them."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.evidence.records import SCHEMA_VERSION, Frozen
from tpcompile.evidence.records.bounds import Rank
from tpcompile.evidence.text.phrases import phrase
from tpcompile.evidence.text.ranks import exact_ranks
from tpcompile.preflight.backends import Resolvers, answers, resolved_backends
from tpcompile.preflight.weights import Group, Layout, Weight
from tpcompile.torch_api import compiler as compat
from tpcompile.version import installed

VERSIONS, ENV, CONFIG, BACKENDS, DEVICE = "versions", "environment variables", "compiler settings", "backends", "device"
TOPOLOGY, DTYPES, WEIGHTS, SHARDS = "topology", "dtype policy", "replicated weights", "shards"
UNDECLARED, CHANGES = "undeclared weights", "changes"
KNOWN_GROUPS = (TOPOLOGY, VERSIONS, DEVICE, ENV, CONFIG, BACKENDS, DTYPES, WEIGHTS, SHARDS, UNDECLARED)
"""What a handshake compares, cause before effect."""

_PLACES = {
    **dict.fromkeys(("torch", "cuda", "triton", "driver", "nccl"), (VERSIONS, "version ")),
    **dict.fromkeys(("gpu", "capability"), (DEVICE, "device ")),
    "env": (ENV, ""),
    "config": (CONFIG, ""),
}
"""First word of a fact of the environment layer -> (its group, prefix of its key); all other facts are backends."""
_PACKAGES = (
    "tpcompile", "flash-attn", "flash_attn_3", "flashinfer-python", "xformers", "sageattention", "transformer-engine",
    "torchao", "deep-ep", "nvidia-cutlass-dsl", "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13", "kernels", "transformers",
    "diffusers",
)  # fmt: skip
"""Packages whose presence or version changes the backend that `auto` resolves to."""


class RankFacts(Frozen):
    """Everything that a preflight check compares of one rank."""

    schema_version: int = SCHEMA_VERSION
    groups: dict[str, dict[str, str]] = {}
    """Group -> key -> value; a key whose values are not equal on all ranks of the domain is a difference."""
    shards: dict[str, Weight] = {}
    """Sharded parameters and buffers, without their bits; their shapes must tile the full tensor."""

    def of(self, group: str) -> dict[str, str]:
        """The facts of one group; empty when they were not collected."""
        return self.groups.get(group, {})

    def part(self, group: str) -> RankFacts:
        """The facts of one group alone, as they are sent when asked for."""
        if group == SHARDS:
            return RankFacts(shards=self.shards)
        return RankFacts(groups={group: self.of(group)})

    def sha(self, group: str) -> str:
        """Hash of one group."""
        return hashlib.sha256(self.part(group).to_json().encode()).hexdigest()


class SetupDigest(Frozen):
    """What every rank publishes: hashes by group, and the facts in which healthy ranks differ."""

    schema_version: int = SCHEMA_VERSION
    rank: Rank
    domain: str
    """Ranks with the same text must agree."""
    shas: dict[str, str]
    unresolved: dict[str, str] = {}
    """Resolver of the caller that raised -> its error."""
    own: dict[str, str] = {}
    """Host, process, device index, cache folders; listed, never compared."""


def rank_facts(
    *, mesh: DeviceMesh | None, group: Group, device: torch.device, resolved: Resolvers, weights: Mapping[str, Weight]
) -> tuple[RankFacts, dict[str, str]]:
    """Facts of this rank, and the caller's resolvers that raised."""
    named, unresolved = answers(resolved)
    found = _environment()
    found[BACKENDS] |= resolved_backends(device) | named
    found[DEVICE] |= {"device type": device.type}
    found[TOPOLOGY] = topology(mesh, group)
    found |= weight_facts(weights)
    found[DTYPES]["autocast cache"] = str(torch.is_autocast_cache_enabled())
    for kind in sorted({"cpu", device.type}):
        is_on = torch.is_autocast_enabled(kind)
        found[DTYPES][f"autocast {kind}"] = str(torch.get_autocast_dtype(kind)) if is_on else "off"
    # Without bits, in which shards differ by nature; a handshake of frozen weights compares each with its own past.
    shards = {n: w.changed(print="") for n, w in weights.items() if w.layout == Layout.SHARDED}
    return RankFacts(groups=found, shards=shards), unresolved


def weight_facts(weights: Mapping[str, Weight]) -> dict[str, dict[str, str]]:
    """dtypes of all tensors, and the fingerprints of those that are not shards."""

    groups = {Layout.REPLICATED: WEIGHTS, Layout.UNDECLARED: UNDECLARED}
    found: dict[str, dict[str, str]] = {DTYPES: {}, WEIGHTS: {}, UNDECLARED: {}}
    for name, weight in weights.items():
        dtype = f"{weight.dtype} with gradient" if weight.requires_grad else weight.dtype
        found[DTYPES][f"dtype of {name}"] = phrase(dtype, weight.kind)  # `float32 with gradient, DTensor`
        if weight.layout in groups:
            found[groups[weight.layout]][f"weight {name}"] = weight.print
    return found


def topology(mesh: DeviceMesh | None, group: Group) -> dict[str, str]:
    """World, mesh and groups as this rank sees them; equal on all ranks, in whichever group they are."""
    facts = {"topology world size": str(dist.get_world_size()), "topology default backend": dist.get_backend()}
    if mesh is None:
        return facts | {"topology ranks": exact_ranks(group.ranks)}
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    facts |= {"topology mesh axes": ", ".join(names), "topology mesh ranks": str(mesh.mesh.tolist())}
    for dim, name in enumerate(names):
        process_group = mesh.get_group(dim)
        facts[f"topology backend of {name}"] = dist.get_backend(process_group)
        ranks = dist.get_process_group_ranks(process_group)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "this rank is among the ranks of the mesh"
        at = tuple(slice(None) if i == dim else index for i, index in enumerate(coordinate))
        row = mesh.mesh[at].tolist()
        is_expected = sorted(ranks) == sorted(row)
        group_text = "as the mesh says" if is_expected else f"{ranks}, the mesh says {row}"
        facts[f"topology group of {name}"] = group_text
    return facts


def own_facts(device: torch.device) -> dict[str, str]:
    """Facts in which healthy ranks differ."""
    variables = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED", *sorted(compat.PER_RANK_ENVIRONMENT))
    facts = {"host": socket.gethostname(), "process id": str(os.getpid()), "device": str(device)}
    return facts | {f"env {name}": os.environ[name] for name in variables if name in os.environ}


def _environment() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {group: {} for group in (VERSIONS, ENV, CONFIG, BACKENDS, DEVICE)}
    for key, value in compat.environment().items():
        group, prefix = _PLACES.get(key.partition(" ")[0], (BACKENDS, "backend "))
        found[group][f"{prefix}{key}"] = value
    found[VERSIONS]["version python"] = platform.python_version()
    found[VERSIONS] |= {f"version {name}": installed(name) or "none" for name in _PACKAGES}
    found[VERSIONS]["version cudnn"] = str(torch.backends.cudnn.version())
    return found
