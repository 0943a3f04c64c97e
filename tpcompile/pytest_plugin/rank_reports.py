"""A marked test -> the reports of its ranks, within a time limit, and from them the reports of the test."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tpcompile.pytest_plugin import combine, session
from tpcompile.pytest_plugin.files import Job, TestRun
from tpcompile.pytest_plugin.watch import Watch

_OF_A_RANK: dict[str, Any] = {
    **{"keyword": "", "markexpr": "", "deselect": None, "pyargs": False},  # the test is selected by its id
    **{"numprocesses": None, "maxprocesses": None, "dist": "no", "tx": []},
    **{"usepdb": False, "trace": False, "capture": "no"},
    **{"setupshow": False, "setuponly": False, "setupplan": False, "collectonly": False},
    **{"xmlpath": None, "cov_source": None, "no_cov": True},
}
"""Options of a rank's session that differ from those of this one."""


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
