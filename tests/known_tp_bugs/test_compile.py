"""Known TP bugs of what is compiled: 18, 19; and that every known bug has a test."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.graphs import GraphCapture
from tests.known_tp_bugs.criteria import IS_OLD, compiled_once, errors_of, wrong
from tests.known_tp_bugs.job import Found
from tests.numerics.modules import NormedMLP, inputs
from tpcompile.collectives.strategies import Collectives
from tpcompile.layout import Part, ShardSpec
from tpcompile.numerics.single_device import Reference

NUM_BUGS = 22


def rank_print(x: Tensor) -> Tensor:
    """Known TP bug 18: the log line of rank 0."""
    y = x.sin()
    if dist.get_rank() == 0:
        print("", end="")
    return y * 2


def rank_branch(x: Tensor) -> Tensor:
    """Known TP bug 18: no break on any rank."""
    if dist.get_rank() == 0:
        x = x.sin()
    return x * 2


def divergence(comm: Collectives) -> dict[str, Any]:
    """Known TP bug 18: what each rank compiled."""

    def ours(x: Tensor) -> Tensor:
        return torch.where(comm.rank_index(x.device) == 0, x.sin(), x) * 2

    # Ours first: Dynamo numbers constant tensors through the whole process, and the print gives one rank more frames.
    found: dict[str, Any] = {p.__name__: compiled_once(p, torch.ones(4, 8)) for p in (ours, rank_branch, rank_print)}
    found["equal results"] = torch.equal(found["ours"]["result"], found["rank_branch"]["result"])
    return found


def uneven_tokens(comm: Collectives) -> dict[str, int]:
    """Known TP bug 18: compiles for 8 tokens and then 7, split as they come and padded to equal shares."""
    x = torch.ones(8, 4)
    shares = {
        "uneven": [x[:n].tensor_split(comm.size)[comm.rank] for n in (8, 7)],
        "padded": [
            ShardSpec(dim=0, parts=(Part(n, padded=True),)).take(x[:n], rank=comm.rank, size=comm.size) for n in (8, 7)
        ],
    }
    found = {}
    for name, tokens in shares.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(lambda x: x.sin() * 2, backend="eager")
        for share in tokens:
            compiled(share)
        found[name] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


def _keep_collectives(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_collective = op.namespace == "_c10d_functional"
    return CheckpointPolicy.MUST_SAVE if is_collective else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """An MLP that is recomputed in the backward pass; with `keeps`, all of it but the collectives."""

    def __init__(self, comm: Collectives, *, keeps: bool) -> None:
        super().__init__()
        self.inner = NormedMLP(comm)
        contexts = functools.partial(create_selective_checkpoint_contexts, _keep_collectives)
        self.options: dict[str, Any] = {"context_fn": contexts} if keeps else {}

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False, **self.options)


def checkpointing(comm: Collectives) -> dict[str, Any]:
    """Known TP bug 19: traced collectives of a training step, and the declared ones."""
    found: dict[str, Any] = {}
    for name, keeps in (("all recomputed", False), ("collectives kept", True)):
        torch._dynamo.reset()
        reference = Reference(functools.partial(Checkpointed, keeps=keeps), inputs, dtype=torch.float32)
        capture, module = GraphCapture(), reference.place(comm)
        errors = errors_of(reference, comm, module=module, backend=capture)
        with CommDebugMode() as eager:
            errors |= {f"eager {name}": error for name, error in errors_of(reference, comm, module=module).items()}
        found[name] = {"errors": errors, "traced": capture.collectives, "eager": eager.get_total_counts()}
        declared = module.inner.declared(torch.float32).select(train=True)
        found["declared"] = [(c.phase, c.op, c.reduce_op, c.dtype, c.shape) for c in declared]
    return found


ON_RANKS = {2: (divergence, uneven_tokens, checkpointing)}


def test_bug_18_a_print_on_rank_zero_breaks_the_graph_of_one_rank(two_ranks: Found) -> None:
    ranks = [r["rank_print"] for r in two_ranks["divergence"]]
    assert [r["breaks"] for r in ranks] == [1, 0] and [r["graphs"] for r in ranks] == [2, 1]
    assert ranks[0]["texts"] != ranks[1]["texts"]


def test_bug_18_a_rank_branch_breaks_no_graph_and_shows_in_their_texts_alone(two_ranks: Found) -> None:
    ranks = [r["rank_branch"] for r in two_ranks["divergence"]]
    assert [(r["graphs"], r["breaks"]) for r in ranks] == [(1, 0), (1, 0)]
    assert ranks[0]["texts"] != ranks[1]["texts"]


def test_bug_18_the_rank_as_data_gives_all_ranks_one_graph(two_ranks: Found) -> None:
    ranks = [r["ours"] for r in two_ranks["divergence"]]
    assert [(r["graphs"], r["breaks"]) for r in ranks] == [(1, 0), (1, 0)]
    assert ranks[0]["texts"] == ranks[1]["texts"]
    assert all(r["equal results"] for r in two_ranks["divergence"]), "and does what the branch does"


def test_bug_18_uneven_shares_compile_again_on_one_rank_and_padded_ones_on_none(two_ranks: Found) -> None:
    assert [r["uneven"] for r in two_ranks["uneven_tokens"]] == [1, 2]
    assert [r["padded"] for r in two_ranks["uneven_tokens"]] == [1, 1]


def test_bug_19_activation_checkpointing_issues_forward_collectives_again(two_ranks: Found) -> None:
    for r in two_ranks["checkpointing"]:
        assert wrong([r["all recomputed"]["errors"]]) == wrong([r["collectives kept"]["errors"]]) == {}
        recomputed, kept, num_declared = r["all recomputed"], r["collectives kept"], len(r["declared"])
        num_forward = sum(row[0] == "forward" for row in r["declared"])
        # Not the last one: nothing needs its result again. torch 2.11 keeps what an autograd.Function made.
        assert len(recomputed["traced"]) == num_declared + (0 if IS_OLD else num_forward - 1)
        assert recomputed["eager"] == num_declared + num_forward - 1
        assert kept["traced"] == r["declared"]
        assert kept["eager"] == num_declared


def missing_bugs(sources: Iterable[str]) -> set[int]:
    """Numbers that no test of these sources is named after."""
    names = re.findall(r"^def test_bug_(\d\d(?:_and_\d\d)*)_", "\n".join(sources), re.MULTILINE)
    return set(range(1, NUM_BUGS + 1)) - {int(n) for name in names for n in name.split("_and_")}


def test_every_known_bug_has_a_test() -> None:
    assert missing_bugs(p.read_text() for p in Path(__file__).parent.glob("test_*.py")) == set()


@pytest.mark.parametrize("name", ["test_bug_5_x", "a_test_bug_05_x", "test_bug_15_x"])
def test_a_known_bug_without_a_test_is_missing(name: str) -> None:
    sources = [f"def test_bug_{n:02}_x() -> None: ..." for n in range(1, NUM_BUGS + 1) if n != 5]
    assert missing_bugs([*sources, f"def {name}() -> None: ..."]) == {5}
