"""A sentinel that goes on is heard: whatever the program imports and whatever it did to loguru."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from loguru import logger as loguru_logger
from torch import Tensor

from tests.forked import PYTHONPATH
from tpcompile.sink import Sink
from tpcompile.testing import run_on_ranks


def _diverge(sinks: str) -> str:
    """stderr of this rank while a rank constant is reported."""
    from tests.sentinel.ranks import Ranks

    if sinks == "none":
        loguru_logger.remove()
    factor = dist.get_rank() + 1

    def step(x: Tensor) -> Tensor:
        return funcol.all_reduce(x * factor, "sum", dist.group.WORLD)

    sys.stderr = written = io.StringIO()
    try:
        with Ranks().sentinel(policy="warn"):
            torch.compile(step, backend="eager")(torch.ones(3))
    finally:
        sys.stderr = sys.__stderr__
    return written.getvalue()


@pytest.mark.parametrize("sinks", ["default", "none"])
def test_a_warning_is_seen_once_where_the_whole_package_is_imported(sinks: str) -> None:
    texts = run_on_ranks(_diverge, sinks)
    lines = [line for text in texts for line in text.splitlines()]
    warnings = [line for line in lines if "rank divergence" in line]
    assert len(warnings) == 1, lines
    assert warnings[0].startswith("[rank ") and "WARNING: rank divergence: " in warnings[0]


WARNING = """
import tpcompile.sentinel
from tpcompile.sink import Sink
exec("Sink('sentinel').warning('seen {}', 1)", {"Sink": Sink, "__name__": "tpcompile.sentinel.anywhere"})
"""


@pytest.mark.slow
def test_a_warning_is_seen_once_where_the_sentinel_alone_is_imported() -> None:
    """A new process: those that are forked have the whole package, whose import could change the settings of loguru."""
    command = [sys.executable, "-c", WARNING]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": PYTHONPATH}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "tpcompile sentinel, WARNING: seen 1\n")


def test_a_program_that_enabled_the_package_gets_the_record_too(capsys: pytest.CaptureFixture[str]) -> None:
    from tpcompile.sink import Sink

    loguru_logger.disable("tpcompile")  # a command that ran in this process has enabled it
    records: list[Any] = []
    number = loguru_logger.add(lambda message: records.append(message.record), level="DEBUG", filter="tpcompile")
    sink = Sink("sentinel")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "__name__", "tpcompile.sentinel.somewhere")
            sink.warning("unheard {}", 1)
            loguru_logger.enable("tpcompile")
            sink.warning("heard {}", 2)
            sink.error("failed", exception=ValueError("why"))
            sink.debug("detail")
    finally:
        loguru_logger.disable("tpcompile")
        loguru_logger.remove(number)
    assert [(r["level"].name, r["message"]) for r in records] == [
        ("WARNING", "heard 2"), ("ERROR", "failed"), ("DEBUG", "detail"),
    ]  # fmt: skip
    written = capsys.readouterr().err
    assert "tpcompile sentinel, WARNING: unheard 1\n" in written and "ValueError: why" in written
    assert "detail" not in written


def test_news_is_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    loguru_logger.disable("tpcompile")  # a command that ran in this process has enabled it
    sink = Sink("sentinel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "__name__", "tpcompile.sentinel.somewhere")  # whose records that handler does not get
        sink.info("rank 0 has waited {} s", 12)
        sink.warning("a problem")
    news, problem = capsys.readouterr().err.splitlines()
    assert "12 s" in news and "WARNING" not in news
    assert "WARNING" in problem
