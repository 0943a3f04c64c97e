"""`tpcompile.run`: what it refuses at once, what it calls a program, and the end of a callable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpcompile
from tests.profiles.recorder import Recorder
from tpcompile.errors import ConfigError
from tpcompile.profiles import callables, chosen
from tpcompile.profiles.callables import label_of
from tpcompile.recording import CaptureSession


def halved(x: Tensor) -> Tensor:
    return x / 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "profile": ({"profile": "fast"}, "unknown profile 'fast'; choose from default, graphed, max-autotune, measured"),
    "graphs": ({"profile": "graphed"}, "needs GPUs with NCCL, and CUDA is not available here; use profile="),
    "number": ({"max_graphs": 0}, "max_graphs=0; at least 1"),
    "group": ({"group": 3}, "group is a int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused_at_once_in_one_line(name: str) -> None:
    options, says = REFUSED[name]
    with pytest.raises(ConfigError, match=says) as caught:
        tpcompile.run(halved, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_default_is_one_graph_and_a_break_is_an_error(fresh_compiler: None) -> None:
    with tpcompile.run(halved, profile="default") as call:
        assert call(torch.ones(2)).tolist() == [0.5, 0.5]
        assert (call.profile, call.num_captures, call.num_replays) == ("default", 0, 0)

    def breaks(x: Tensor) -> Tensor:
        print("", end="")
        return x

    with pytest.raises(Exception, match="print"):
        tpcompile.run(breaks, profile="default")(torch.ones(2))


def test_a_closed_callable_has_released_its_graphs_and_refuses_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callables, "CudaGraphs", Recorder)
    monkeypatch.setattr(callables, "no_graphs", lambda group: "")
    with tpcompile.run(halved, profile="graphed", is_compiled=True) as call:
        assert call(torch.ones(2)).tolist() == [0.5, 0.5]
    (graphed,) = call._graphed()
    assert [graph.is_live for graph in graphed._recorder.graphs] == [False]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"^halved .*closed"):
        call(torch.ones(2))


def test_a_session_records_the_profiles_that_were_in_use() -> None:
    before = tpcompile.run(halved, profile="default", is_compiled=True, name="ended")
    before.close()
    with CaptureSession() as session:
        with tpcompile.run(halved, is_compiled=True) as call:
            call(torch.ones(2))
        record = session.record(rank=0, world_size=1)
    found = {name.removeprefix("profile of "): value for name, value in record.environment}
    assert found["halved"] == "measured: default"
    assert "ended" not in found


def test_profiles_of_one_label_are_listed_in_order() -> None:
    without = [chosen.add("a", "default")]
    for profile in ("graphed", "default"):
        chosen.add("a", profile)
    found = {name.removeprefix("profile of "): value for name, value in chosen.entries(without=without).items()}
    assert found["a"] == "graphed, default"


class Mlp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_program_is_called_by_its_class_or_function() -> None:
    assert [label_of(one) for one in (Mlp(), torch.compile(Mlp()), halved)] == ["Mlp", "Mlp", "halved"]
