"""A marked test -> the reports of its ranks, within a time limit, and from them the reports of the test."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tpcompile.pytest_plugin import combine, session
from tpcompile.pytest_plugin.causes import RankEnd
from tpcompile.pytest_plugin.files import ERROR, STREAMS, Job, TestRun, read_text

_OF_A_RANK: dict[str, Any] = {
    **{"keyword": "", "markexpr": "", "deselect": None, "pyargs": False},  # the test is selected by its id
    **{"numprocesses": None, "maxprocesses": None, "dist": "no", "tx": []},
    **{"usepdb": False, "trace": False, "capture": "no"},
    **{"setupshow": False, "setuponly": False, "setupplan": False, "collectonly": False},
    **{"xmlpath": None, "cov_source": None, "no_cov": True},
}
"""Options of a rank's session that differ from those of this one."""

_POLL_S = 0.02
_GRACE_S = 3.0
"""Least seconds that the other ranks have to fail by themselves after one rank failed."""
_ENDING_S = 10.0
"""A rank that is stopped ends within this time."""


def reports(item: pytest.Item, nextitem: pytest.Item | None, wanted: tuple[int, float]) -> Iterator[pytest.TestReport]:
    """Run a test on ranks; `wanted` is their number and the limit in seconds."""
    world_size, timeout_s = wanted
    with session.connect(item.config) as running:
        if running.why_not:
            yield from combine.not_checked(item, running.why_not)
        else:
            job = _job(item, world_size, timeout_s)
            running.start(job)
            yield from combine.of_test(item, job, Watch(job, running).ends())
    # Fixtures of other tests, in this process, that the next test does not share.
    state = item.session._setupstate
    call = pytest.CallInfo.from_call(lambda: state.teardown_exact(nextitem), when="teardown")
    if call.excinfo is not None:
        yield pytest.TestReport.from_item_and_call(item, call)


# One job


def _job(item: pytest.Item, world_size: int, timeout_s: float) -> Job:
    config = item.config
    # A rank prints nothing, and has no part in the cache of results.
    plugins = (*config.option.plugins, "no:terminal", "no:cacheprovider")
    test = TestRun(
        nodeid=item.nodeid,
        args=(*[word for name in plugins for word in ("-p", name)], str(item.path)),
        options=_options(config),
        workerinput=_plain({"workerid": "master", **getattr(config, "workerinput", {})}),
    )
    factory: pytest.TempPathFactory | None = getattr(config, "_tmp_path_factory", None)  # None by -p no:tmpdir
    folder = str(factory.mktemp("ranks")) if factory else tempfile.mkdtemp(prefix="tpcompile-")
    job = Job(
        folder=folder,
        world_size=world_size,
        target="tpcompile.pytest_plugin.rank:run",
        arguments=test,
        timeout_s=timeout_s,
    )
    job.environ["CUDA_VISIBLE_DEVICES"] = ""
    job.environ.pop("GITHUB_STEP_SUMMARY", None)  # this session writes it, when it knows which tests failed
    return job


def _options(config: pytest.Config) -> dict[str, Any]:
    """Options of this session, without those that select tests, write reports, or start processes."""
    own = _plain(vars(config.option))
    for name in ("plugins", "file_or_dir"):
        own.pop(name, None)
    ini = str(config.inipath) if config.inipath else None
    return {**own, "rootdir": str(config.rootpath), "inifilename": ini, **_OF_A_RANK}


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that JSON can hold: a rank's session gets no objects of this one."""
    found = {}
    for name, value in fields.items():
        with suppress(TypeError, ValueError):
            found[name] = json.loads(json.dumps(value))
    return found


# The ranks of a job that runs


class Watch:
    """Reads the files of a job until all its ranks have ended."""

    def __init__(self, job: Job, running: session.Running) -> None:
        self._files, self._running = job.files, running
        self._ranks = [RankEnd(rank) for rank in range(job.world_size)]
        self._read_lines = [0] * job.world_size
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + job.timeout_s
        self._has_failed = False

    def ends(self) -> list[RankEnd]:
        """How each rank ended."""
        try:
            while self._step() and self._running.is_served(_POLL_S):
                pass
        except BaseException:  # Ctrl-C
            self._stop([rank for rank in self._ranks if rank.exit_code is None], is_late=False)
            raise
        is_served = self._running.is_served()  # first: what the server wrote before its end is there then
        for end in self._ranks:
            self._read(end)
            end.stack = read_text(self._files.stack(end.rank))
            for stream in STREAMS:
                whole = read_text(self._files.output(end.rank, stream))
                reported = 0
                for when, report in end.reports.items():
                    texts = [text for name, text in report["sections"] if name == f"Captured {stream} {when}"]
                    reported += sum(map(len, texts))
                end.unreported[stream] = whole[reported:]
            if end.exit_code is None and not is_served:
                end.error = end.error or f"lost their server: {session.HAS_ENDED}"
        return self._ranks

    def _step(self) -> bool:
        """Look once; False when all ranks have ended."""
        for end in self._ranks:
            self._read(end)
        alive = [end for end in self._ranks if end.exit_code is None]
        in_body = [end for end in alive if not end.has_called]
        now_s = time.monotonic()
        has_failed = any(end.has_failed for end in self._ranks)
        if has_failed and not self._has_failed:
            self._has_failed = True
            self._shorten_limit(now_s)
        if now_s > self._deadline_s:
            self._stop(alive, is_late=not has_failed)
        if not in_body and not self._files.go.exists():
            self._files.go.touch()
            self._shorten_limit(now_s)
        return bool(alive) and now_s < self._deadline_s + _ENDING_S

    def _shorten_limit(self, now_s: float) -> None:
        """Give the other ranks, after a failure, as long again as the test had run, and once more for the teardown."""
        if self._has_failed:
            took_s = now_s - self._began_s
            self._deadline_s = min(self._deadline_s, now_s + max(_GRACE_S, took_s))

    def _stop(self, ends: Iterable[RankEnd], *, is_late: bool) -> None:
        new = [end for end in ends if not end.is_late and not end.is_stopped]
        for end in new:
            end.is_late, end.is_stopped = is_late, not is_late
        self._running.stop([end.rank for end in new])

    def _read(self, end: RankEnd) -> None:
        lines = read_text(self._files.reports(end.rank)).split("\n")[:-1]
        for line in lines[self._read_lines[end.rank] :]:
            fields = json.loads(line)
            if ERROR in fields:
                end.error = end.error or fields[ERROR]
            else:
                end.reports[fields["when"]] = fields
        self._read_lines[end.rank] = len(lines)
        end.exit_code = self._running.codes[end.rank]  # from before the look: what it wrote before its end is there
