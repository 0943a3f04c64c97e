"""The two nodes of these tests themselves."""

from __future__ import annotations

from pathlib import Path

from tests.forked import became
from tests.nodes.machines import Node, Nodes


def test_a_command_that_has_not_opened_its_files_yet_has_printed_nothing(tmp_path: Path) -> None:
    a, b = (Node(f"node-{letter}", f"tpc-{letter}", "", tmp_path / letter) for letter in "ab")
    assert Nodes(a, b).output("node-a") == ""


def test_what_a_failed_test_left_running_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    """The fixture looks after this test whether anything runs; nothing here waits for the command."""
    program = tmp_path / "sleeps.py"
    program.write_text("import time\nprint('ready', flush=True)\ntime.sleep(100)\n")
    nodes.start(nodes.a, [program])
    assert became(lambda: "ready" in nodes.output("node-a"))
    assert nodes.a.pids() != []
