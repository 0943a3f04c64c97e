"""What tests/fusion/test_inlining.py shows on whole programs needs these names of Inductor."""

from __future__ import annotations

import pytest

from tpcompile.torch_api import inlined


@pytest.mark.parametrize("name", ["realize_reads_threshold", "realize_opcount_threshold"])
def test_a_limit_is_a_number_for_a_gpu_and_for_the_cpu(name: str) -> None:
    limit = getattr(inlined._config, name)
    assert min(inlined._LIMITS[name] if limit is None else [limit]) > 0


@pytest.mark.parametrize("name", ["inner_fn_opcount", "num_reads"])
def test_a_pointwise_op_says_how_much_it_reads_and_computes(name: str) -> None:
    assert callable(getattr(inlined._ir.Pointwise, name))
