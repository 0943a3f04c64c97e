#!/usr/bin/env python
"""A recorded two-rank job -> TORCH_TRACE files of any size, to measure `tpcompile diagnose` on.

    scripts/make_big_logs.py OUT --from tests/data/jobs/torch-2.13.0/stride --mb 240

Every copy of the job's compiles gets different function names, lines and shapes, as in a large model; object ids and
addresses differ between the ranks, as in real logs. `--faulty N` keeps the fault of the job in N copies (default: in
all); the other copies have rank 0's compiles on both ranks. `--filler` adds that many bytes of unread events per byte
that is read: a real log has about six.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

NAME = "dedicated_log_torch_trace_rank_{}_{}.log"
LINE = re.compile(r"^([A-Z]\d{4} [\d:.]+ \d+ .*?\] )(\{.*\})$")
OBJECT_ID = re.compile(r"(?<=, )\d{12,}(?=\))|0x[0-9a-f]{9,}")
FILLER = 'V1121 15:15:15.319000 1 x.py:1] {"chromium_event": {}, "rank": 0}\n'
FILLER_LINE = '\t{"name": "inductor", "ts": 1795312342125974.8, "args": {"compile_id": "0/0"}, "ph": "B"}\n'


def records(path: Path) -> list[str]:
    """The records of a log, each with its payload."""
    return re.split(r"\n(?=[A-Z]\d{4} )", path.read_text().rstrip("\n"))


def copied(record: str, number: int, functions: set[str], frames: int, ids: random.Random) -> str:
    """The record in copy `number` of the job, with different functions, lines, compile ids and object ids."""
    head, _, payload = record.partition("\n")
    match = LINE.match(head)
    assert match is not None, head
    metadata = json.loads(renamed(match[2], number, functions))
    if "frame_id" in metadata:
        metadata["frame_id"] += number * frames
    if not payload:
        return f"{match[1]}{json.dumps(metadata)}\n"
    text = renamed("\n".join(line[1:] for line in payload.split("\n")), number, functions)
    text = OBJECT_ID.sub(lambda found: str(ids.randrange(10**13, 10**14)), text)
    if "has_payload" in metadata:
        metadata["has_payload"] = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    lines = "".join(f"\t{line}\n" for line in text.split("\n"))
    return f"{match[1]}{json.dumps(metadata)}\n{lines}"


def renamed(text: str, number: int, functions: set[str]) -> str:
    """The text with different function names; the table of strings, which has the file's name, is written once.

    The method of a printed graph is always called `forward`, whatever the function is called.
    """
    for function in functions:
        text = re.sub(rf"(?<!def )\b{function}\b", f"{function}_{number}", text)
    return text


def functions_of(log: list[str]) -> set[str]:
    """Names of the compiled functions."""
    heads = [LINE.match(record.partition("\n")[0]) for record in log if '"dynamo_start"' in record]
    starts = [json.loads(head[2]) for head in heads if head]
    return {start["dynamo_start"]["stack"][-1]["name"] for start in starts}


def copies(log: list[str], healthy: list[str], faulty: int | None, rank: int) -> Iterator[str]:
    """Copies of the job, without end."""
    ids = random.Random(rank)
    functions = functions_of(log) | functions_of(healthy)
    frames = 1 + max(int(found) for found in re.findall(r'"frame_id": (\d+)', "\n".join(log + healthy)))
    for number in itertools.count():
        chosen = log if faulty is None or number < faulty else healthy
        kept = [record for record in chosen if not (number and '{"str": ' in record)]
        yield "".join(copied(record, number, functions, frames, ids) for record in kept)


def write(path: Path, texts: Iterator[str], num_copies: int, filler: int) -> None:
    """One rank's log."""
    with path.open("w") as file:
        for text in itertools.islice(texts, num_copies):
            file.write(text)
            if filler:
                file.write(FILLER + FILLER_LINE * (filler * len(text) // len(FILLER_LINE)))


def main() -> None:
    """Write the logs of both ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--from", dest="job", type=Path, required=True, help="folder of a recorded job")
    parser.add_argument("--mb", type=int, default=16, help="size of both logs together")
    parser.add_argument("--faulty", type=int, help="copies that keep the fault; default: all")
    parser.add_argument("--filler", type=int, default=0, help="bytes of other events per byte that is read")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    logs = [records(next(args.job.glob(NAME.format(rank, "*")))) for rank in (0, 1)]
    faulty = logs if args.faulty is None else [logs[0], logs[0]]
    size = sum(len(next(copies(log, logs[0], None, 0))) for log in faulty) * (1 + args.filler)
    num_copies = max(1, args.mb * 1_000_000 // size)
    for rank, log in enumerate(logs):
        texts = copies(log, logs[0], args.faulty, rank)
        write(args.out / NAME.format(rank, "big"), texts, num_copies, args.filler)


if __name__ == "__main__":
    main()
