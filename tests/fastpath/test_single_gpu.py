"""The kernel for one GPU is right there, and on shards wrong by what tests on random data do not see, ours do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fastpath import single_gpu
from tpcompile.fastpath.certificate import MAX_RATIO
from tpcompile.testing import run_on_ranks


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        (measured,) = run_on_ranks(single_gpu.measured, world_size=1, timeout_s=200)
    return measured


def test_on_whole_tensors_it_equals_the_plain_code(found: dict[str, Any]) -> None:
    """Grouped heads, sizes 24 to 128, rows with gaps, one token, all element types; within NaN fences."""
    assert len(found["whole"]) == 12 and max(found["whole"].values()) <= MAX_RATIO, found["whole"]
    assert found["no tokens"] == [(1, 8, 0, 64)] * 3


def test_a_wrong_one_is_seen(found: dict[str, Any]) -> None:
    assert max(found["broken"].values()) > MAX_RATIO, found["broken"]


def test_a_norm_over_the_shard_is_off_by_little_on_random_data_and_by_much_where_heads_differ(
    found: dict[str, Any],
) -> None:
    assert found["normal"]["passes"] and 0.005 < found["normal"]["error"] < 0.03, found
    assert not found["skewed"]["passes"] and found["skewed"]["error"] > 0.2, found


def test_cases_like_those_of_certificates_see_it_in_every_dtype(found: dict[str, Any]) -> None:
    assert min(found["shards"].values()) > MAX_RATIO, found["shards"]
