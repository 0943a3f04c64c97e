"""Job, rank -> a pytest session with the one test of the job; its reports go into a file."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from tpcompile.errors import DivergenceError
from tpcompile.pytest_plugin.files import ERROR, IS_LOST_PEER, RANK, RUN_DIR, STREAMS, Job, Place, TestRun
from tpcompile.ranks.pool import connect
from tpcompile.torch_api.forked import keep_trace_from

_MORE_S = 30.0
"""A collective times out so long after the limit of the test, at which pytest stops the rank and names its line."""
_POLL_S = 0.01
_OF_COMMUNICATION = ("Connection", "gloo", "closed by peer", "Socket")


def run(job: Job, rank: int, variables: Mapping[str, str]) -> int:
    """Run the test of the job on this rank. Returns the exit code of the process."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # equal weights on all ranks
    connect(timeout_s=job.timeout_s + _MORE_S)
    # Run the session; 0 unless pytest could not run the test. The failure of a test is in its report.
    place = Place(job, rank)
    temporary = str(place.job.files.folder / f"tmp_{place.rank}")
    test: TestRun = place.job.arguments
    sys.argv = ["pytest", *test.args]
    config = pytest.Config.fromdictargs({**test.options, "basetemp": temporary}, list(test.args))
    config.workerinput = test.workerinput  # type: ignore[attr-defined]  # reporting plugins leave workers of xdist alone
    config.stash[RANK] = place
    config.pluginmanager.register(RankPlugin(config, place, test.nodeid), "tpcompile-rank")
    code = int(config.hook.pytest_cmdline_main(config=config))
    code = 0 if code == pytest.ExitCode.TESTS_FAILED else code
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


class RankPlugin:
    """Selects the test of the job, meets the other ranks before the teardown, and writes the reports."""

    def __init__(self, config: pytest.Config, place: Place, nodeid: str) -> None:
        self._config, self._nodeid, self._rank = config, nodeid, place.rank
        self._files = place.job.files
        self._reports = self._files.reports(place.rank).open("w")
        self._read_bytes = dict.fromkeys(STREAMS, 0)
        """Bytes of the output that earlier reports hold."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Refuse breakpoint(): pytest's debugger would wait for a terminal."""
        sys.breakpointhook = self._refuse_breakpoint

    def _refuse_breakpoint(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"breakpoint() on rank {self._rank}: the ranks of a test have no terminal; debug the code under "
            "`torchrun` with torch.distributed.breakpoint(rank), or without the marker"
        )

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the test of the job."""
        found = {item.nodeid: item for item in reversed(items)}
        if self._nodeid not in found:
            names = ", ".join(found) or "no tests"
            self._write({ERROR: f"did not collect {self._nodeid}, but {names}"})
            items.clear()
            return
        items[:] = [found[self._nodeid]]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write why a file cannot be collected on this rank."""
        if report.failed:
            self._write({ERROR: f"cannot collect the test:\n{report.longreprtext}"})

    def pytest_internalerror(self, excrepr: object) -> None:
        """Write that pytest itself failed."""
        self._write({ERROR: f"stopped with an internal error of pytest:\n{excrepr}"})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Mark reports of lost connections, and add the run directory of a divergence."""
        report = yield
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, RuntimeError):
            is_of_communication = any(word in str(error) for word in _OF_COMMUNICATION)
            if is_of_communication or isinstance(error, dist.DistError):
                setattr(report, IS_LOST_PEER, True)
        if isinstance(error, DivergenceError) and error.run_dir is not None:
            setattr(report, RUN_DIR, str(error.run_dir))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Keep torch's trace out of the captured log."""
        keep_trace_from("_pytest")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        """Keep it out again: pytest attaches its handlers in each phase."""
        keep_trace_from("_pytest")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """Wait until no rank runs the body any more: the end of one would break the collectives of the others."""
        keep_trace_from("_pytest")
        while not self._files.go.exists():
            time.sleep(_POLL_S)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a report, with the output since the previous one."""
        for stream in STREAMS:
            getattr(sys, stream).flush()
            with self._files.output(self._rank, stream).open("rb") as file:
                file.seek(self._read_bytes[stream])
                found = file.read()
            self._read_bytes[stream] += len(found)
            text = found.decode(errors="replace")
            if text:
                report.sections.append((f"Captured {stream} {report.when}", text))
        self._write(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def _write(self, fields: dict[str, Any]) -> None:
        text = json.dumps(fields, default=lambda value: str(value) if isinstance(value, Path) else repr(value))
        print(text, file=self._reports, flush=True)
