"""All ranks before the first compile -> one verdict: set up alike, or what differs, by key and rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.errors import ConfigError
from tpcompile.evidence.comparison.compare import Allowed
from tpcompile.evidence.records import Layer, Verdict
from tpcompile.evidence.text.ranks import exact_ranks
from tpcompile.preflight.backends import Resolvers
from tpcompile.preflight.fact_exchange import Exchanges
from tpcompile.preflight.fact_judge import Judge
from tpcompile.preflight.facts import (
    CHANGES,
    KNOWN_GROUPS,
    WEIGHTS,
    RankFacts,
    SetupDigest,
    own_facts,
    rank_facts,
    weight_facts,
)
from tpcompile.preflight.locate import Question, answer_elements
from tpcompile.preflight.weights import Group, Layout, ShardedBy, Weight, weights_of
from tpcompile.ranks.exchange import Fetch, Side
from tpcompile.report.verdict import ShownVerdict

_LAYERS = [layer.value for layer in Layer]


def check_setup(
    module: nn.Module | None = None,
    *,
    mesh: DeviceMesh | None = None,
    axis: str = "tp",
    store: dist.Store | None = None,
    timeout_s: float = 60.0,
    resolved: Resolvers | None = None,
    sharded: ShardedBy = None,
    allow: Allowed = (),
) -> ShownVerdict:
    """Compare how all ranks are set up; every rank calls it before the first compile, every rank gets the verdict.

    Ranks of one group must agree in versions, variables, settings, resolved backends, device, dtypes and replicated
    weights, and their shards must fit together; the topology must agree on all ranks of the mesh. No collective.

    module: whose weights are compared; None compares none.
    mesh: the mesh of the job; without one, all ranks are one group.
    axis: the axis of the mesh whose ranks must agree.
    store: by default a client of its own at MASTER_ADDR:MASTER_PORT.
    timeout_s: seconds after which a rank that does not call is a failed check with its number.
    resolved: backends of your own, name -> callable or text.
    sharded: which plain tensors of `module` are shards: patterns, a function, or pattern -> full shape.
    allow: intended differences, (layer, text, reason).

    Raises ConfigError for invalid arguments, DivergenceError when the judging rank stops responding.
    """
    handshake = Handshake(
        module,
        mesh=mesh,
        axis=axis,
        store=store,
        timeout_s=timeout_s,
        resolved=resolved,
        sharded=sharded,
        allow=allow,
    )
    return handshake.check()


class Handshake:
    """`check_setup` that remembers the weights: `recheck` names those that changed on some of the ranks since.

    Arguments are those of `check_setup`.

    frozen: nothing may write to the weights after `check`, as in inference; all weights are then hashed.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        mesh: DeviceMesh | None = None,
        axis: str = "tp",
        store: dist.Store | None = None,
        timeout_s: float = 60.0,
        resolved: Resolvers | None = None,
        sharded: ShardedBy = None,
        allow: Allowed = (),
        frozen: bool = False,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s={timeout_s:g} must be positive")
        for layer, text, reason in allow:
            is_complete = bool(text and reason)
            if layer not in _LAYERS or not is_complete:
                given = (layer, text, reason)
                raise ConfigError(
                    f"allow entry {given} must be (layer, text it contains, reason); layers are {_LAYERS}"
                )
        self._module, self._mesh, self._sharded, self._allowed = module, mesh, sharded, allow
        self._resolved, self._frozen, self._timeout_s = resolved or {}, frozen, timeout_s
        self._group = group_of(mesh, axis)
        # init_process_group() without a backend means gloo for CPU and NCCL for GPU tensors.
        has_nccl = "cuda:nccl" in dist.get_backend_config() and torch.cuda.is_available()
        default = "cuda" if has_nccl else "cpu"
        kind = default if mesh is None else mesh.device_type
        self._device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        ranks = range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist()
        self._exchanges = Exchanges("handshake", ranks=ranks, store=store, timeout_s=timeout_s)
        self._before: dict[str, Weight] = {}

    def check(self) -> ShownVerdict:
        """Compare all facts and keep the weights. Raises DivergenceError when the judging rank stops responding."""
        self._exchanges.publish_state("taking fingerprints of the weights")
        weights = self._weights()
        self._exchanges.publish_state("collecting facts")
        facts, unresolved = rank_facts(
            mesh=self._mesh, group=self._group, device=self._device, resolved=self._resolved, weights=weights
        )
        self._before = weights
        return self._exchange(facts, title="preflight", groups=KNOWN_GROUPS, unresolved=unresolved)

    def recheck(self, *, step: int | None = None) -> ShownVerdict:
        """Compare the weights with those at `check`: red when some ranks changed them, listed when all ranks did.

        Replicated weights must also still be bit-equal. Raises ConfigError unless `frozen`, and before `check`.
        """
        if not self._frozen or self._module is None:
            raise ConfigError("recheck compares frozen weights: make it Handshake(module, frozen=True)")
        if not self._before:
            raise ConfigError("recheck has nothing to compare with: call check() first")
        self._exchanges.publish_state("taking fingerprints of the weights again")
        weights = self._weights()
        # A buffer that is not replicated may change.
        old = {name: weight.print for name, weight in self._before.items()}
        new = {name: weight.print for name, weight in weights.items()}
        changes = {}
        for name, weight in (self._before | weights).items():
            is_watched = weight.is_parameter or weight.layout == Layout.REPLICATED
            is_changed = old.get(name, "") != new.get(name, "")
            if is_watched and is_changed:
                changes[f"weight {name}"] = f"changed since the handshake ({weight.layout.value})"
        now = weight_facts(weights)[WEIGHTS]
        facts = RankFacts(groups={CHANGES: changes, WEIGHTS: now})
        return self._exchange(facts, title="preflight recheck", groups=(CHANGES, WEIGHTS), step=step)

    def _weights(self) -> dict[str, Weight]:
        if self._module is None:
            return {}
        return weights_of(self._module, group=self._group, sharded=self._sharded, with_shards=self._frozen)

    def _exchange(
        self,
        facts: RankFacts,
        *,
        title: str,
        groups: Sequence[str],
        unresolved: dict[str, str] | None = None,
        step: int | None = None,
    ) -> ShownVerdict:
        digest = SetupDigest(
            rank=dist.get_rank(),
            domain=f"{self._group.axis} {exact_ranks(self._group.ranks)}",
            shas={group: facts.sha(group) for group in groups},
            unresolved=unresolved or {},
            own=own_facts(self._device),
        )

        def judge(found: dict[int, SetupDigest], absent: dict[int, str], fetch: Fetch) -> Verdict:
            return Judge(
                list(found.values()), absent, fetch, self._timeout_s, title, allowed=self._allowed, step=step
            ).verdict()

        def answer(question: Question) -> object:
            if not question.elements:
                return facts.part(question.group).model_dump(mode="json")
            module = self._module
            tensors = dict(module.named_parameters()) | dict(module.named_buffers()) if module is not None else {}
            return answer_elements(tensors.get(question.elements), question)

        side = Side(digest.model_dump(mode="json"), answer, judge, kind=SetupDigest, question=Question)
        return self._exchanges.verdict(side)


def group_of(mesh: DeviceMesh | None, axis: str) -> Group:
    """The group of `axis` this rank is in, the world without a mesh. Raises ConfigError for an unknown axis."""
    if not dist.is_initialized():
        raise ConfigError("no process group: call torch.distributed.init_process_group before the preflight check")
    if mesh is None:
        return Group(axis, tuple(range(dist.get_world_size())))
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1 and not names:
        names = (axis,)
    if axis not in names:
        raise ConfigError(f"the mesh has no axis {axis!r}; its axes are {list(names)}")
    if mesh.get_coordinate() is None:
        raise ConfigError(f"rank {dist.get_rank()} is not in the mesh; only its members may call")
    process_group = mesh.get_group(names.index(axis))
    return Group(axis, tuple(dist.get_process_group_ranks(process_group)))
