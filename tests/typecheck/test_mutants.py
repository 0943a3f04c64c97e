"""Break one collective of a stack at a time: the check finds each of them, so that a clean stack means something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.nn.test_block import config_of
from tpcompile.collectives import Dst
from tpcompile.collectives.strategies import Collectives
from tpcompile.nn.block import BlockInputs, TransformerStack
from tpcompile.numerics.draw import draw_inputs
from tpcompile.typecheck import Report, check_types

OTHER: dict[str, Dst] = {"I": "R", "R": "I"}
FORMS = [("wan", "full"), ("kv head replicated", "per_head"), ("sequence parallel", "full")]
RULES = {
    ("copy_to_tp", "skipped"): {"missing-copy"},
    ("copy_to_tp", "twice"): {"double-copy"},
    ("all_reduce", "skipped"): {"bias-before-reduce", "partial-used-as-whole"},
    ("all_reduce", "dropped"): {"result-dropped"},
    ("all_reduce", "twice"): {"double-reduce"},
    ("all_reduce", "other type"): {"needs-dst-I", "needs-dst-R"},
    ("all_gather", "other type"): {"needs-dst-I", "needs-dst-R"},
    ("scatter", "other type"): {"wrong-src"},
}


class Mutant(Collectives):
    """Does `what` to call number `place` of the method `name`, and counts these calls."""

    def __init__(self, group: Any, name: str, what: str, place: int) -> None:
        super().__init__(group)
        self.name, self.what, self.place, self.num_calls = name, what, place, 0

    def copy_to_tp(self, x: Tensor) -> Tensor:
        return self._call("copy_to_tp", super().copy_to_tp, x)

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        return self._call("all_reduce", super().all_reduce, x, dst=dst)

    def all_gather(self, x: Tensor, dim: int, dst: Dst = "R") -> Tensor:
        return self._call("all_gather", super().all_gather, x, dim=dim, dst=dst)

    def scatter(self, x: Tensor, dim: int, src: Dst = "I") -> Tensor:
        return self._call("scatter", super().scatter, x, dim=dim, src=src)

    def _call(self, name: str, run: Callable[..., Tensor], x: Tensor, **options: Any) -> Tensor:
        is_hit = name == self.name and self.num_calls == self.place
        self.num_calls += name == self.name
        if not is_hit:
            return run(x, **options)
        if self.what == "other type":
            return run(x, **{k: OTHER[v] if k in ("dst", "src") else v for k, v in options.items()})
        if self.what == "dropped":
            run(x, **options)
        return run(run(x, **options), **options) if self.what == "twice" else x


def _checked(form: tuple[str, str], name: str, what: str, place: int) -> tuple[Report, int]:
    config = config_of(*form, num_layers=1)
    drawn = draw_inputs(config, seed=0, device="cpu", dtype=torch.float64, seq_len=config.seq_len)
    wanted = ("x_BSD", "modulation_B6D", "context")
    inputs = BlockInputs(
        *(t.requires_grad_() if n in wanted and t is not None else t for n, t in drawn._asdict().items())
    )
    made: list[Mutant] = []

    def build(comm: Collectives) -> nn.Module:
        made.append(Mutant(comm.group, name, what, place))
        return TransformerStack(config, made[-1], num_layers=config.num_layers)

    return check_types(build, inputs, tp=4, ranks=(0,)), made[0].num_calls


@pytest.mark.parametrize("mutation", RULES, ids="-".join)
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_every_broken_collective_of_a_stack_is_found(form: tuple[str, str], mutation: tuple[str, str]) -> None:
    clean, num_calls = _checked(form, *mutation, place=-1)
    assert clean.finding is None
    if mutation[0] in ("copy_to_tp", "all_reduce") and "sequence" not in form[0]:
        assert num_calls >= 2, "nothing to break"
    for place in range(num_calls):
        finding = _checked(form, *mutation, place=place)[0].finding
        assert finding is not None, f"call {place} of {num_calls} is broken and not found"
        assert finding.rule in RULES[mutation], str(finding)
