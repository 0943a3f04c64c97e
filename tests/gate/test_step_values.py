"""gate/step_values.py: what of a train step is compared with the reference's."""

from __future__ import annotations

import pytest
import torch

from tpcompile.gate.step_values import Ran, comparable
from tpcompile.numerics.optimizer_step import GRADIENT, WEIGHT


@pytest.mark.parametrize(("held", "is_compared"), [("parameter 0.0", False), ("up", True)])
def test_gradients_are_compared_of_a_parameter_that_an_optimizer_has_in_each_run(held: str, is_compared: bool) -> None:
    """An optimizer of replicas may have parts of all parameters in one of its own: then the weights say it."""
    up, flat = torch.arange(4.0), torch.zeros(2)
    single = Ran({}, {(GRADIENT, "up"): up, (WEIGHT, "up"): up}, {"up": up}, frozenset({"up"}))
    made = {(WEIGHT, "up"): up, (GRADIENT, "parameter 0.0"): flat, (WEIGHT, "parameter 0.0"): flat}
    own = Ran({}, made, {"up": up, "parameter 0.0": flat}, frozenset({held}))
    found = comparable([own], single, single, rank=0, size=2)
    assert (f"forward {GRADIENT} of up" in found.single) == is_compared
    assert all(f"forward {WEIGHT} of up" in compared for compared in (found.single, found.own[0]))
