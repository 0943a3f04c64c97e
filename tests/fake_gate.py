"""Stand-in for repro/tp_compile_repro.py in the launch tests: one rank that does what FAKE_BEHAVIOUR says.

Runs under real torchrun (RANK is set) or alone, where `FAKE_WORLD` copies stand for the ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable

from tpcompile.evidence.records import Check, CheckId, Status, Verdict
from tpcompile.evidence.rundir import RankStatus, RunDir

STOP_S = 600.0


def main() -> None:
    """Take part in one fake run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True)
    run = RunDir(parser.parse_known_args()[0].run_dir)
    if "RANK" not in os.environ:
        ranks = _started(int(os.environ["FAKE_WORLD"]))
        if ranks:
            sys.exit(_ended(ranks))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    behave(os.environ["FAKE_BEHAVIOUR"], run, rank, world)


def behave(behaviour: str, run: RunDir, rank: int, world: int) -> None:
    """Write this rank's files and end as FAKE_BEHAVIOUR says; rank 1 has the fault."""
    if behaviour == "silent":
        return
    if behaviour == "silent_error":
        sys.exit(1)
    if behaviour == "refused":  # before any rank has a status
        run.write_verdict(Verdict(status=Status.FAIL, exit_code=2, world_size=world, summary="no such file"))
        sys.exit(2)
    if behaviour == "pass_talking":
        print("a rank talks", flush=True)
    if behaviour == "pass_warned":
        print("W1128 17:50:18.190000 283 torch/utils/cpp_extension.py:178] a warning", file=sys.stderr, flush=True)
    if behaviour.startswith("killed"):
        signal.signal(signal.SIGTERM, lambda *_: _stopped(behaviour, run, rank, world))
    _say(run, rank, world, "C/first", "running")
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if behaviour in ("hang", "stubborn"):
        time.sleep(STOP_S)
    if behaviour.startswith("killed") and rank == 1:
        # Not before rank 0 can tell the tale: the launcher stops it as soon as this one is gone.
        _wait(lambda: any(status.rank == 0 for status in run.read_statuses()))
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour.startswith("killed"):
        time.sleep(STOP_S)
    _say(run, rank, world, "done", "finished")
    codes = {"pass": 0, "pass_talking": 0, "pass_warned": 0, "red": 1, "preflight": 4, "crash_after_pass": 0}
    code = codes[behaviour]
    if rank == 0:
        status = Status.FAIL if code else Status.PASS
        run.write_verdict(Verdict(status=status, exit_code=code, world_size=world, summary=f"fake {behaviour}"))
    _wait(lambda: run.read_verdict() is not None)
    sys.exit(1 if code or behaviour == "crash_after_pass" else 0)


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STOP_S
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)


def _stopped(behaviour: str, run: RunDir, rank: int, world: int) -> None:
    _say(run, rank, world, "C/first", "stopped")
    if behaviour == "killed_unknown":
        check = Check(id=CheckId.ALIVE, mode="C", status=Status.FAIL, expected="", observed="SIGTERM")
        run.write_verdict(
            Verdict(status=Status.FAIL, exit_code=5, world_size=world, summary="SIGTERM", checks=(check,))
        )
    sys.exit(143)


def _say(run: RunDir, rank: int, world: int, phase: str, state: str) -> None:
    run.write_status(RankStatus(rank=rank, world_size=world, pid=os.getpid(), host="host", phase=phase, state=state))


def _started(world: int) -> list[int]:
    """Ranks in sessions of their own, as torchrun starts them, forked from this process; in a rank there are none."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ranks = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
            return []
        ranks.append(pid)
    return ranks


def _ended(ranks: list[int]) -> int:
    """Stop the others when one has failed; whether one has."""
    left = set(ranks)
    has_failed = False
    while left:
        pid, status = os.wait()
        left.remove(pid)
        if status and not has_failed:
            has_failed = True
            for other in left:
                os.kill(other, signal.SIGTERM)
    return int(has_failed)


if __name__ == "__main__":
    main()
