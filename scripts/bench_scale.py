"""What an exchange and a leave of N ranks cost over one real TCPStore, for numbers of ranks that no machine here has.

    python scripts/bench_scale.py --ranks 8,64,256,1024 --equal 4096 --json results/scale_cpu.json

No GPU. The store, rank 0, and every 256 other ranks, threads with a client each, are a process. Every rank gives the
digest of a small record to the code of the gate, or leaves as a rank of a sentinel does; connecting is not timed. CPU
time of the judge is that of its thread, its memory what its process grew by, `bytes` what passed to and from the store.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # torch looks up the host name of every client

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.evidence import samples
from tpcompile import config
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.records import RankRecord, Verdict
from tpcompile.evidence.rundir import RankStatus, RunDir
from tpcompile.evidence.timeline.flow import Flow
from tpcompile.gate.measurements import GateDigest, GateFacts
from tpcompile.gate.replay import gate_rules
from tpcompile.gate.status import StatusBoard
from tpcompile.ranks.exchange import Exchange, Side
from tpcompile.ranks.liveness import this_host
from tpcompile.ranks.recorded import record_side
from tpcompile.ranks.store import RankStore
from tpcompile.sentinel.listener import Listener
from tpcompile.sentinel.messages import FINISHED, RUNNING, RankState
from tpcompile.sentinel.store_log import StoreLog

CASES = ("equal", "one differs", "leave")
TIMEOUT_S = 300.0
ODD_LINE = 77
"""The line whose constant the odd rank has different."""
RULES = config.load("cpu_smoke", modes=("C",))
_PART = 256
"""Ranks of one process at most: threads that wait for its lock cost more than what they do."""
_FORK = multiprocessing.get_context("fork")


class Tally:
    """Operations and bytes of the ranks of one process; they share it without a lock, as `Counter` adds in one step."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def sent(self, key: str, *values: Any) -> None:
        self.counts["operations"] += 1
        self.counts["bytes set"] += sum(map(len, values))
        what = key.removeprefix("bench/").split("/")
        self.counts["questions"] += "ask" in what

    def got(self, key: str, value: Any) -> Any:
        self.counts["operations"] += 1
        self.counts["bytes got"] += len(value)
        self.counts["left entries read"] += b'"kind": "left"' in value[:4000]
        return value


class Counted:
    """A store that counts what passes through it."""

    def __init__(self, store: dist.Store, tally: Tally, prefix: str = "") -> None:
        self.store, self.tally, self.prefix = store, tally, prefix

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Any other operation, which carries keys alone."""
        operation = getattr(self.store, name)

        def call(key: Any, *values: Any) -> Any:
            self.tally.sent("", *map(str, values))
            keys = [self.prefix + one for one in key] if isinstance(key, list) else self.prefix + key
            return operation(keys, *values)

        return call

    def set(self, key: str, value: str) -> None:
        self.tally.sent(key, value)
        self.store.set(self.prefix + key, value)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.tally.sent(key, key, value)
        self.store.multi_set([self.prefix + key for key in keys], values)

    def get(self, key: str) -> bytes:
        return self.tally.got(key, self.store.get(self.prefix + key))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        found = self.store.compare_set(self.prefix + key, expected, value)
        if expected != value:  # else it writes nothing: a look at what is there
            self.tally.sent(key, expected, value)
        return self.tally.got(key, found)

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.tally.sent("")
        self.store.wait([self.prefix + key for key in keys], timeout)


class Rank(RankStore):
    """The store of one simulated rank."""

    def under(self, prefix: str) -> Rank:
        counted: Any = self._store
        deeper: Any = Counted(counted.store, counted.tally, f"{counted.prefix}{prefix}/")
        return Rank(deeper, rank=self.rank, world_size=self.world_size)


def connect(port: int, tally: Tally, rank: int, world_size: int) -> Rank:
    client = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    counted: Any = Counted(client, tally, "bench/")
    return Rank(counted, rank=rank, world_size=world_size)


def record(rank: int, world_size: int, *, is_odd: bool) -> RankRecord:
    """A small record of the gate: a digest of about 9 kB."""
    constant = samples.call("mul", "%0", "3" if is_odd else "2", at=ODD_LINE)
    compiles = [
        samples.compiled(constant, samples.reduce("%1"), compile_id=f"{n}/0", phase=phase, line=samples.line(10 + n))
        for n, phase in enumerate(("A/first", "B/first", "C/first", "C/again", "C/more", "C/last", "C/resized"))
    ]
    error = {"error": 1e-7 * (rank + 1), "single": 1e-7, "ratio": 1.0 + rank / 1e6}
    found = GateFacts(median_ms={"C": 1.0 + rank / 1e6})
    for kind in ("forward", "grad", "eager"):
        found = found.with_errors("C", {f"{kind} {name}": error for name in ("output", "wq", "wk", "wv", "wo")})
    counters = [samples.counters(phase) for phase in ("A/first", "B/first", "C/first", "C/resized")]
    counters.append(samples.counters("C/steady", calls=RULES.gate.steady_calls, frames=0, graphs=0))
    return samples.record(
        rank,
        *compiles,
        world_size=world_size,
        facts=found.model_dump(mode="json"),
        counters=tuple(counters),
        places={"local rank": rank % 8, "device index": rank % 8},
    )


def side_of(rank: int, world_size: int, *, is_odd: bool) -> Side:
    """What a rank of the gate contributes at its end."""
    mine = record(rank, world_size, is_odd=is_odd)
    return record_side(mine, gate_rules(RULES), kind=GateDigest, flow_of=lambda _: Flow())


def exchange(client: Rank, folder: Path, side: Side) -> Verdict | None:
    """One rank of the gate, at its end."""
    board = StatusBoard(RunDir(folder), client, prints_phases=False)
    client.put(f"status/{client.rank}", status(client))
    return Exchange(client, range(client.world_size), others=board, timeout_s=TIMEOUT_S).verdict(side)


def status(client: Rank) -> dict[str, Any]:
    """A rank that is alive, as all are here in one process."""
    here = {"pid": os.getpid(), "host": "here", "namespace": this_host(), "phase": "C/resized", "state": "comparing"}
    return RankStatus(rank=client.rank, world_size=client.world_size, **here).model_dump(mode="json")


def leave(client: Rank, listening: Rank) -> None:
    """One rank of a sentinel that has nothing to compare: it begins to listen, and leaves."""
    own = threading.get_ident()
    clients = {True: client, False: listening}
    log = StoreLog(lambda: clients[threading.get_ident() == own], range(client.world_size), domain="tp", number=0)
    listener = Listener(log, lambda event: None)
    listener.start()
    state = RankState(rank=client.rank, activity=RUNNING, since_s=0.0, ended=FINISHED)
    log.leave(state, has_heard=listener.has_ended)
    listener.close()
    log.forget()


def play(ranks: range, world_size: int, case: str, place: tuple[int, str], results: Any) -> None:
    """All simulated ranks of one process; puts what they found and used."""
    port, folder = place
    threading.stack_size(1 << 18)
    # A thread that waits for the interpreter's lock wakes up once an interval to ask for it: with the 5 ms of Python,
    # 4,096 waiting ranks spend 34 s in the kernel and 13 to 53 s of wall time on nothing that a rank of a job does.
    sys.setswitchinterval(1.0)
    tally = Tally()
    count = 2 if case == "leave" else 1
    with ThreadPoolExecutor(256) as pool:
        wanted = [rank for rank in ranks for _ in range(count)]
        clients = list(pool.map(lambda rank: connect(port, tally, rank, world_size), wanted))
    odd = (5 * world_size // 8) if case == "one differs" else -1
    sides = {rank: side_of(rank, world_size, is_odd=rank == odd) for rank in ranks if case != "leave"}
    start = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    grown_kb = -resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start.add("ready", len(ranks))
    while start.add("ready", 0) < world_size:
        time.sleep(0.02)
    tally.counts.clear()
    found: dict[int, Any] = {}
    cpu: dict[int, float] = {}

    def run(index: int, rank: int) -> None:
        mine = clients[index * count : (index + 1) * count]
        try:
            found[rank] = leave(*mine) if case == "leave" else exchange(mine[0], Path(folder), sides[rank])
        except Exception as error:  # of the rank: the report says which
            found[rank] = error
        cpu[rank] = time.thread_time()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(ranks)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = time.monotonic() - began
    grown_kb += resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start.add("done", len(ranks))
    while start.add("done", 0) < world_size:
        time.sleep(0.05)
    texts = Counter(_text(one, odd) for one in found.values())
    results.put((ranks[0], wall_s, dict(tally.counts), texts, cpu[ranks[0]], grown_kb, start.num_keys()))


def _text(found: Any, odd: int) -> str:
    """What a rank found, in a word."""
    if not isinstance(found, Verdict):
        return repr(found)
    if odd < 0:
        return "equal" if found.exit_code == 0 else found.summary
    lead = found.lead
    is_right = lead is not None and lead.ranks == (odd,) and lead.line is not None and lead.line.line == ODD_LINE
    return "rank and line right" if is_right else found.summary


def serve(port: Any, stop: Any) -> None:
    """The store, until told to stop; then its CPU time."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))
    port.put(server.port)
    stop.get()
    used = resource.getrusage(resource.RUSAGE_SELF)
    port.put(used.ru_utime + used.ru_stime)


def measure(world_size: int, case: str) -> dict[str, Any]:
    """One case with that many ranks."""
    port, stop, results = _FORK.Queue(), _FORK.Queue(), _FORK.Queue()
    store = _FORK.Process(target=serve, args=(port, stop), daemon=True)
    store.start()
    with tempfile.TemporaryDirectory() as folder:
        place = (port.get(), folder)
        parts = [range(1), *(range(at, min(at + _PART, world_size)) for at in range(1, world_size, _PART))]
        playing = [
            _FORK.Process(target=play, args=(part, world_size, case, place, results), daemon=True) for part in parts
        ]
        for process in playing:
            process.start()
        judge, *others = sorted(results.get(timeout=2 * TIMEOUT_S) for _ in playing)
        for process in playing:
            process.join()
    stop.put(True)
    store_cpu_s = port.get()
    store.join()
    counts = sum((Counter(part[2]) for part in (judge, *others)), Counter[str]())
    return {
        "ranks": world_size,
        "case": case,
        "found": dict(sum((part[3] for part in others), judge[3])),
        "wall_s": round(max(part[1] for part in (judge, *others)), 2),
        "store_cpu_s": round(store_cpu_s, 2),
        "judge_cpu_s": round(judge[4], 2),
        "judge_mb": round(judge[5] / 1024, 1),
        "judge_bytes": judge[2].get("bytes got", 0) + judge[2].get("bytes set", 0),
        "keys_left": max(part[6] for part in (judge, *others)) - 2,  # `ready` and `done`
        **{name.replace(" ", "_"): counts[name] for name in ("questions", "operations", "bytes set", "bytes got")},
        **({"left_entries_read": counts["left entries read"]} if case == "leave" else {}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,256", help="numbers of ranks, of every case")
    parser.add_argument("--equal", default="", help="numbers of ranks, of the case in which all are equal")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the processes, too
    wanted = [(int(n), case) for n in arguments.ranks.split(",") if n for case in arguments.cases.split(",")]
    wanted += [(int(n), "equal") for n in arguments.equal.split(",") if n]
    rows = []
    for world_size, case in wanted:
        rows.append(measure(world_size, case))
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "command": "python scripts/bench_scale.py " + " ".join(sys.argv[1:]),
        "machine": f"CPU, {os.cpu_count()} cores, {platform.machine()}; load {os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "digest_bytes": len(json.dumps(digest_rank(record(0, 8, is_odd=False)).model_dump(mode="json"))),
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
