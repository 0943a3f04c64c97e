"""pytest plugin: a test with `@pytest.mark.tp(world_size=2)` runs on every rank of a job; fixture `tp`.

__init__.py    hooks of pytest: marker, options, fixture; a marked test goes to the ranks
rank_reports.py    a marked test -> what each rank reported, within a time limit
session.py     a session -> its one server of ranks, shared by the workers of xdist
server.py      jobs -> ranks, forked from a process that has imported torch
files.py       a job of ranks, and its files, through which the ranks and pytest communicate
rank.py        one rank: a pytest session with this one test
function_on_ranks.py    a call of `run_on_ranks` -> its ranks, forked from the server
fixture.py     the fixture `tp` in a rank: mesh, collectives, `expect`, `check`
combine.py     reports of all ranks -> reports of the test, one per cause
causes.py      reports and exits of the ranks -> one failure per cause
verdict.py     a verdict -> the text of a failed test
github.py      failures -> annotations and step summary of GitHub Actions

Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

from tpcompile.pytest_plugin.files import RANK
from tpcompile.ranks import pool

if TYPE_CHECKING:
    from tpcompile.pytest_plugin.fixture import TensorParallel

_MARK = "tp(world_size=2, timeout_s=None): run the test on every rank of a job of that many gloo ranks"
_TIMER = pytest.StashKey[float]()
"""The limit that pytest-timeout would have set, in seconds."""
_TIMEOUT_S = 120.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the plugin."""
    group = parser.getgroup("tpcompile")
    group.addoption(
        "--tp-require", action="store_true", help="fail where a test on ranks cannot be checked, instead of a skip"
    )
    parser.addini(
        "tp_timeout_s", f"seconds for a test on ranks that has no `timeout` (default {_TIMEOUT_S:g})", default=""
    )
    parser.addini("tp_preload", "modules that are imported once, before the ranks are forked", type="args", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the server as what `run_on_ranks` forks its ranks from."""
    config.addinivalue_line("markers", _MARK)
    if RANK in config.stash:
        return

    def forked(call: pool.Call) -> AbstractContextManager[pool.ExitCodes]:
        from tpcompile.pytest_plugin import function_on_ranks

        return function_on_ranks.start(config, call)

    config.add_cleanup(pool.register(forked))


def pytest_report_header(config: pytest.Config) -> str | None:
    """Warn that --pdb and --trace do not work on ranks."""
    if config.getoption("usepdb", False) or config.getoption("trace", False):
        return "tpcompile: --pdb and --trace do not reach tests marked tp: their ranks have no terminal"
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to import torch for the ranks; under xdist only a worker that gets a test on ranks does."""
    config = session.config
    is_alone = RANK not in config.stash and not hasattr(config, "workerinput")
    if is_alone and not config.getoption("collectonly") and any(map(_is_on_ranks, session.items)):
        from tpcompile.pytest_plugin.session import start_server

        start_server(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let the workers of xdist on this machine share one server of ranks."""
    if node.gateway.spec.popen:
        from tpcompile.pytest_plugin import session

        session.share_with(node.workerinput, node.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the server of ranks."""
    if RANK not in config.stash:
        from tpcompile.pytest_plugin import session

        session.end(config)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write annotations on the user's lines and the step summary, in GitHub Actions."""
    stats = terminalreporter.stats
    failed = [*stats.get("failed", ()), *stats.get("error", ())]
    is_worker = hasattr(terminalreporter.config, "workerinput")  # of xdist: the session that it belongs to writes
    if failed and not is_worker:
        from tpcompile.pytest_plugin import github

        for line in github.write(failed):
            terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Keep the limit of pytest-timeout for a test on ranks; the plugin applies it and names the late ranks."""
    if not _is_on_ranks(item):
        return None
    item.stash[_TIMER] = float(settings.timeout)
    return True


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    """No timer was set."""
    return True if _is_on_ranks(item) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test on ranks; leave all other tests, and every test inside a rank, to pytest."""
    if not _is_on_ranks(item) or RANK in item.config.stash:
        return None
    from tpcompile.pytest_plugin import rank_reports

    mark = item.get_closest_marker("tp")
    assert mark is not None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in rank_reports.reports(item, nextitem, _wanted(item, *mark.args, **mark.kwargs)):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _is_on_ranks(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.get_closest_marker("tp") is not None


def _wanted(item: pytest.Item, world_size: int = 2, *, timeout_s: float | None = None) -> tuple[int, float]:
    """Number of ranks, and the limit in seconds: that of the marker, of pytest-timeout, of the ini file."""
    if timeout_s is not None:
        return world_size, timeout_s
    if item.stash.get(_TIMER, 0.0) > 0:
        return world_size, item.stash[_TIMER]
    return world_size, float(item.config.getini("tp_timeout_s") or _TIMEOUT_S)


@pytest.fixture
def tp(request: pytest.FixtureRequest) -> Iterator[TensorParallel]:
    """This rank of a test with `@pytest.mark.tp(world_size=2)`: see `tpcompile.pytest_plugin.fixture`."""
    place = request.config.stash.get(RANK, None)
    if place is None:
        pytest.fail("the fixture `tp` needs a test marked @pytest.mark.tp(world_size=2)", pytrace=False)
    from tpcompile.pytest_plugin.fixture import TensorParallel

    yield TensorParallel(place)
