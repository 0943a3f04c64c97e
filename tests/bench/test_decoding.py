"""scripts/bench_decoding.py: what it says of tokens and of a program that failed; the whole runs by hand, on GPUs."""

from __future__ import annotations

import pytest

from scripts.bench_decoding import equal_tokens, first_error

LOG = """W1126 torch/distributed/run.py: Setting OMP_NUM_THREADS
[rank1]: Traceback (most recent call last):
[rank1]:     raise ConfigError(f"the profile needs {what}")
[rank1]: tpcompile.errors.ConfigError: the profile needs GPUs
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


@pytest.mark.parametrize(
    ("found", "number"), [([[1, 2, 3], [4, 5, 6]], 3), ([[1, 2, 3], [4, 5, 0]], 2), ([[0, 2, 3], [4, 5, 0]], 0)]
)
def test_equal_tokens_end_at_the_first_that_differs_in_any_sequence(found: list[list[int]], number: int) -> None:
    assert equal_tokens(found, [[1, 2, 3], [4, 5, 6]]) == number


def test_the_reason_of_a_failure_is_the_end_of_the_first_traceback_and_no_source_line() -> None:
    assert first_error(LOG) == "tpcompile.errors.ConfigError: the profile needs GPUs"
    assert first_error("all is well") == ""
