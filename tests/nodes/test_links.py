"""A job on two nodes, with a sentinel: a fault is named with its host, and what becomes of the link between them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.forked import TORCHRUN, Ended, became
from tests.nodes.machines import PORT, Node, Nodes
from tpcompile.errors import ExitCode
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
PROGRAM = Path(__file__).with_name("program.py")


def start(nodes: Nodes, what: str, steps: int, *limits: str, nproc: int = 1) -> None:
    """`torchrun --nnodes 2 program.py` on both; each has run directories of its own."""
    for number, node in enumerate(nodes):
        flags = {
            "nnodes": 2, "nproc-per-node": nproc, "node-rank": number,
            "master-addr": nodes.a.name, "master-port": PORT,
        }  # fmt: skip
        nodes.start(
            node,
            [*TORCHRUN, *(f"--{name}={value}" for name, value in flags.items()), PROGRAM, what, str(steps), *limits],
        )


def verdict_of(node: Node) -> Verdict:
    """What is in the run directory of that node."""
    found = RunDir(node.folder / "run").read_verdict()
    assert found is not None
    return found


def is_through(ended: dict[str, Ended]) -> bool:
    """True where every rank of the job came to its end, and nothing was said of it."""
    outputs = [one.stdout for one in ended.values()]
    return all("is through" in text for text in outputs) and not any(
        "tpcompile" in one.stderr for one in ended.values()
    )


def test_a_recompile_is_named_with_its_host_in_the_folder_of_each_node(nodes: Nodes) -> None:
    start(nodes, "recompiles", 12, nproc=2)
    ended = nodes.wait()
    assert [one.returncode for one in ended.values()] == [1, 1]
    assert "rank 3 (node-b)" in ended["node-a"].stderr
    for node, ranks in ((nodes.a, {0, 1}), (nodes.b, {2, 3})):
        verdict = verdict_of(node)
        assert verdict.lead is not None
        assert (verdict.lead.cause, verdict.lead.ranks) == (Cause.SHAPE, (3,))
        assert verdict.hosts == {"node-a": (0, 1), "node-b": (2, 3)}
        assert {record.rank for record in RunDir(node.folder / "run").read_records()} == ranks


def test_a_cut_of_some_seconds_costs_nothing(nodes: Nodes) -> None:
    start(nodes, "nothing", 30)
    assert became(lambda: "step 5" in nodes.output("node-a"))
    nodes.b.cable("down")
    time.sleep(5.0)
    nodes.b.cable("up")
    assert is_through(nodes.wait())


def test_a_cut_for_good_ends_both_sides_with_the_reason(nodes: Nodes) -> None:
    start(nodes, "nothing", 10_000, "unresponsive_s=6")
    assert became(lambda: "step 5" in nodes.output("node-a"))
    nodes.b.cable("down")
    ended = nodes.wait(60.0)
    assert [one.returncode for one in ended.values()] == [1, 1]
    for here, away, ranks in ((nodes.a, "node-b", (1,)), (nodes.b, "node-a", (0,))):
        verdict = verdict_of(here)
        assert verdict.exit_code == ExitCode.FAIL
        assert verdict.lead is not None
        assert (verdict.lead.cause, verdict.lead.ranks) == (Cause.STOPPED_RESPONDING, ranks)
        assert away in verdict.lead.says
        assert " since " in verdict.lead.says
        assert "died" not in verdict.lead.says


def test_a_slow_link_is_no_alarm(nodes: Nodes) -> None:
    """What leaves node-b waits for tens of milliseconds with every packet."""
    if reason := nodes.b.slow_down("250kbit"):
        pytest.skip(f"this kernel delays no packets: {reason}")
    start(nodes, "nothing", 8)
    assert is_through(nodes.wait())
    assert nodes.b.num_delayed() > 20
