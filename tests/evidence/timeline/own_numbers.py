"""Programs whose texts have numbers in them: the rank's own, and what is none. Lines that differ end with `# sets`."""

from __future__ import annotations

from tests.evidence.timeline.programs import collective


def keeps_files_of_its_own(rank: int) -> None:
    name, parts = "shard", 4
    files = [f"logs/node{rank}/{name}_{rank:03d}_of_{parts}.log", f"cuda:{rank}"]  # sets
    for step in range(5):
        collective(step, files)


def reads_another_version(rank: int) -> None:
    version = f"v{int(rank == 1)}"  # sets
    for step in range(5):
        collective(step, version)


def reads_another_file(rank: int) -> None:
    data = f"set_{'b' if rank == 1 else 'a'}_{rank}.pt"  # sets
    for step in range(5):
        collective(step, data)
