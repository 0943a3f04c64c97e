"""The rank runner itself: a failing rank is named with its traceback, a silent one is killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.rank_jobs import run_on_ranks


def _one_fails_while_the_other_waits() -> None:
    if dist.get_rank() == 1:
        raise ValueError("seven of nine")
    dist.all_reduce(torch.ones(1))


def _sleeps() -> None:
    time.sleep(600)


def test_the_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed:.*_one_fails_while_the_other_waits.*seven of nine"):
        run_on_ranks(_one_fails_while_the_other_waits)


def test_ranks_that_do_not_finish_are_killed_and_named() -> None:
    started_s = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] did not finish"):
        run_on_ranks(_sleeps, timeout_s=1)
    assert time.monotonic() - started_s < 30


def _trace_files() -> int:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    dist.barrier()
    return len(list(Path(os.environ["TORCH_TRACE"]).glob("*_rank_*")))


def test_forked_ranks_have_the_variables_of_now_and_write_the_trace_they_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_on_ranks(len, "") == [0, 0]  # the process that they come from has started
    monkeypatch.setenv("TORCH_TRACE", str(tmp_path))
    assert run_on_ranks(_trace_files) == [2, 2]
