"""The pods of a PyTorchJob, whose operator sets no LOCAL_RANK: the gate; `capture` and `check` on a cut link."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from tests.forked import Ended, became
from tests.gate.runs import AOT
from tests.nodes.machines import PORT, Node, Nodes
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
CHECKED = Path(__file__).with_name("checked.py")


def pod(number: int) -> dict[str, str]:
    """What the operator sets in a pod; the first pod is to serve at its own `localhost`."""
    return {
        "MASTER_ADDR": "localhost" if number == 0 else "node-a", "MASTER_PORT": str(PORT),
        "WORLD_SIZE": "2", "RANK": str(number), "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    }  # fmt: skip


def run(nodes: Nodes, *command: str | Path) -> None:
    """The command of the job, in both pods."""
    for number, node in enumerate(nodes):
        nodes.start(node, command, pod(number))


def test_the_gate_names_the_pod(nodes: Nodes) -> None:
    target = ["--target", "tests.gate.own:functional", "--set", "fault=dtype", "--device", "cpu", "--set", AOT[0]]
    run(nodes, "-m", "tpcompile", "gate", *target, "--run-dir", "run")
    ended = nodes.wait()
    assert [one.returncode for one in ended.values()] == [1, 1], ended["node-a"].stderr[-2000:]
    for node in nodes:
        verdict = RunDir(node.folder / "run").read_verdict()
        assert verdict is not None
        assert verdict.hosts == {"node-a": (0,), "node-b": (1,)}
        assert "node-b" in verdict.summary


def _is_ready(nodes: Nodes, node: Node) -> bool:
    return "ready" in nodes.output(node.name)


def cut(nodes: Nodes, when: str) -> dict[str, Ended]:
    """How the pods ended whose link was cut for good."""
    run(nodes, CHECKED, when)
    for node in nodes:
        assert became(partial(_is_ready, nodes, node)), nodes.output(node.name)
    nodes.b.cable("down")
    for node in nodes:
        (node.folder / "cut").touch()
    return nodes.wait(60.0)


def test_a_check_is_green(nodes: Nodes) -> None:
    run(nodes, CHECKED, "never")
    ended = nodes.wait()
    assert [one.returncode for one in ended.values()] == [0, 0], ended["node-a"].stderr[-2000:]
    assert "host: node-a 0 | node-b 1" in ended["node-a"].stdout


def test_a_cut_inside_of_capture_ends_both_sides_with_the_reason(nodes: Nodes) -> None:
    ended = cut(nodes, "inside")
    assert [one.returncode for one in ended.values()] == [1, 1]
    for here, away in ((nodes.a, "node-b"), (nodes.b, "node-a")):
        verdict = RunDir(here.folder / "run").read_verdict()
        assert verdict is not None
        assert verdict.lead is not None
        assert verdict.lead.cause == Cause.STOPPED_RESPONDING
        assert away in verdict.lead.says


def test_a_cut_before_check_ends_both_sides_with_the_reason(nodes: Nodes) -> None:
    ended = cut(nodes, "before")
    assert [one.returncode for one in ended.values()] == [1, 1]
    for one in ended.values():
        (took,) = re.findall(r"check took ([\d.]+) s", one.stdout)
        assert float(took) < 30
    assert "rank 1" in ended["node-a"].stdout  # it serves the store: a verdict
    assert f"node-a:{PORT}" in ended["node-b"].stderr
    assert "not answer" in ended["node-b"].stderr
