"""A marked test -> the reports of its ranks, within a time limit, and from them the reports of the test."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tpcompile.pytest_plugin import combine
from tpcompile.pytest_plugin.ends import RankEnd
from tpcompile.pytest_plugin.files import Job
from tpcompile.pytest_plugin.watch import Watch

_ENDING_S = 10.0
"""The server has ended by then."""
_OF_A_RANK: dict[str, Any] = {
    **{"keyword": "", "markexpr": "", "deselect": None, "pyargs": False},  # the test is selected by its id
    **{"numprocesses": None, "maxprocesses": None, "dist": "no", "tx": []},
    **{"usepdb": False, "trace": False, "capture": "no"},
    **{"setupshow": False, "setuponly": False, "setupplan": False, "collectonly": False},
    **{"xmlpath": None, "cov_source": None, "no_cov": True},
}
"""Options of a rank's session that differ from those of this one."""
_CODE = "import sys; sys.path[:] = {path!r}; from tpcompile.pytest_plugin.server import main; main({preload!r})"


def reports(item: pytest.Item, nextitem: pytest.Item | None, wanted: tuple[int, float]) -> Iterator[pytest.TestReport]:
    """Run a test on ranks; `wanted` is their number and the limit in seconds."""
    world_size, timeout_s = wanted
    server = start_server(item.config)
    why_not = server.wait()
    if why_not:
        yield from combine.not_checked(item, why_not)
    else:
        job = _job(item, world_size, timeout_s)
        yield from combine.of_test(item, job, server.run(job))
    yield from _tear_down_shared(item, nextitem)


def _tear_down_shared(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
    """Fixtures of other tests, in this process, that the next test does not share."""
    state = item.session._setupstate
    call = pytest.CallInfo.from_call(lambda: state.teardown_exact(nextitem), when="teardown")
    if call.excinfo is not None:
        yield pytest.TestReport.from_item_and_call(item, call)


# The server


class Server:
    """The process that ranks are forked from, or why there is none."""

    def __init__(self, preload: Iterable[str]) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._why_not: str | None = _why_not() or None
        if self._why_not is None:
            self._start(list(preload))

    def _start(self, preload: list[str]) -> None:
        code = _CODE.format(path=sys.path, preload=preload)
        # A session of its own: Ctrl-C is for pytest, which ends the ranks.
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> str:
        """Wait until ranks can be forked; why they cannot, or an empty text."""
        if self._why_not is None:
            assert self._process is not None and self._process.stdout is not None
            answer = self._process.stdout.readline()
            ended = "the process that ranks are forked from ended at its start"
            self._why_not = json.loads(answer) if answer else ended
        return str(self._why_not)

    def run(self, job: Job) -> list[RankEnd]:
        """Run a job to its end; how each rank ended."""
        assert self._process is not None and self._process.stdin is not None
        job.write()
        print(json.dumps(job.folder), file=self._process.stdin, flush=True)
        return Watch(job, is_served=lambda: self._process is not None and self._process.poll() is None).ends()

    def end(self) -> None:
        """End the process; it ends the ranks that are left."""
        if self._process is None:
            return
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_SERVER = pytest.StashKey[Server]()


def start_server(config: pytest.Config) -> Server:
    """The server of a session, which is started with the first call."""
    if _SERVER not in config.stash:
        config.stash[_SERVER] = Server(config.getini("tp_preload"))
    return config.stash[_SERVER]


def end_server(config: pytest.Config) -> None:
    """End the server of a session, if one was started."""
    if _SERVER in config.stash:
        config.stash[_SERVER].end()


def _why_not() -> str:
    """Why this machine cannot have ranks, as far as it is known without torch."""
    if not hasattr(os, "fork"):
        return "this platform has no fork"
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    return _out_of_range(found)


def _out_of_range(found: str) -> str:
    from packaging.requirements import Requirement

    try:
        wanted = importlib.metadata.requires("tpcompile") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return ""
    for requirement in map(Requirement, wanted):
        if requirement.name == "torch" and not requirement.specifier.contains(found, prereleases=True):
            return f"torch {found} is not in the range that tpcompile knows, {requirement.specifier}"
    return ""


# One job


def _job(item: pytest.Item, world_size: int, timeout_s: float) -> Job:
    config = item.config
    folder = _folder(item)
    return Job(
        folder=str(folder),
        world_size=world_size,
        nodeid=item.nodeid,
        args=(*_plugins(config), str(item.path)),
        options=_options(config),
        workerinput=_plain({"workerid": "master", **getattr(config, "workerinput", {})}),
        environ=dict(os.environ),
        cwd=os.getcwd(),
        sys_path=tuple(sys.path),
        timeout_s=timeout_s,
    )


def _folder(item: pytest.Item) -> Path:
    factory: pytest.TempPathFactory | None = getattr(item.config, "_tmp_path_factory", None)
    if factory is None:  # -p no:tmpdir
        return Path(tempfile.mkdtemp(prefix="tpcompile-"))
    return factory.mktemp("ranks", numbered=True)


def _plugins(config: pytest.Config) -> Iterator[str]:
    """Arguments with the plugins of this session; a rank prints nothing and has no part in the cache of results."""
    for name in (*config.option.plugins, "no:terminal", "no:cacheprovider"):
        yield from ("-p", name)


def _options(config: pytest.Config) -> dict[str, Any]:
    """Options of this session, without those that select tests, write reports, or start processes."""
    own = _plain(vars(config.option))
    for name in ("plugins", "file_or_dir"):
        own.pop(name, None)
    ini = str(config.inipath) if config.inipath else None
    return {**own, "rootdir": str(config.rootpath), "inifilename": ini, **_OF_A_RANK}


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold of it."""
    found = {}
    for name, value in fields.items():
        with suppress(TypeError, ValueError):
            found[name] = json.loads(json.dumps(value))
    return found
