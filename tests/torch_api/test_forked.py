"""What a forked rank sets up again: its own trace, and caches on or off."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._functorch.config
import torch._inductor.config
import torch._logging._internal as logging_internal
import torch._logging.structured

from tpcompile.torch_api import forked


@pytest.fixture
def own_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The trace of this process, as it was again after the test."""
    with monkeypatch.context() as patch:
        patch.setattr(torch._logging.structured, "INTERN_TABLE", {})
        yield patch
    forked.new_trace_handler()


def test_the_trace_goes_where_torch_trace_points_now(own_trace: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch._logging.structured.INTERN_TABLE["model.py"] = 0
    before = logging_internal.LOG_TRACE_HANDLER
    own_trace.setenv("TORCH_TRACE", str(tmp_path))
    forked.new_trace_handler()
    handler = logging_internal.LOG_TRACE_HANDLER
    assert handler is not before and handler in logging_internal.trace_log.handlers
    assert handler.root_dir == str(tmp_path)
    assert not torch._logging.structured.INTERN_TABLE, "a new trace has given no file name yet"


def test_a_logger_that_was_asked_before_has_the_level_of_now(own_trace: pytest.MonkeyPatch) -> None:
    own_trace.setattr(logging_internal, "log_state", logging_internal.log_state)
    log = logging.getLogger("torch._dynamo.a_module")
    assert not log.isEnabledFor(logging.DEBUG)
    own_trace.setenv("TORCH_LOGS", "+dynamo")
    forked.new_trace_handler()
    assert log.isEnabledFor(logging.DEBUG)


def test_handlers_of_pytest_leave_the_trace_and_those_of_torch_stay(caplog: pytest.LogCaptureFixture) -> None:
    trace = logging_internal.trace_log
    trace.addHandler(caplog.handler)
    others = [handler for handler in trace.handlers if not type(handler).__module__.startswith("_pytest")]
    forked.keep_trace_from("_pytest")
    assert trace.handlers == others


@pytest.mark.parametrize(("value", "is_left"), [("0", True), ("1", False)])
def test_triton_is_imported_again_where_its_interpreter_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, value: str, is_left: bool
) -> None:
    modules = dict.fromkeys(("triton", "triton.language", "triton._C.libtriton", "tritonclient"))
    monkeypatch.setattr(forked.sys, "modules", modules)
    monkeypatch.setenv("TRITON_INTERPRET", value)
    forked.import_triton_as_asked()
    assert ("triton" in modules, "triton.language" in modules) == (is_left, is_left)
    assert {"triton._C.libtriton", "tritonclient"} <= modules.keys()


@pytest.mark.parametrize("name", forked.MODULES)
def test_a_module_that_is_imported_before_a_fork_is_there(name: str) -> None:
    assert importlib.util.find_spec(name) is not None
