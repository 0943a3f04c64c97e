"""A torchrun target: several runs of the gate in one process, one after the other.

torchrun ... tests/gate/many.py FOLDER

`FOLDER/jobs.json` maps a name to the keyword arguments of `config.load`, or of `load_target` where they name a target;
run NAME leaves its files in `FOLDER/NAME`.
A start of torch costs more than a run, and only faults that leave every rank alive can share a process.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from pathlib import Path

from tpcompile import config, gate
from tpcompile.torch_api import interpreted


def main() -> None:
    """Run every job on this rank; note each exit code and what the run left behind in the process."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreted.like_gpus()  # a launch takes half the time
    gc.freeze()  # each run looks for garbage, among what was imported as well
    folder = Path(sys.argv[1])
    for name, fields in json.loads((folder / "jobs.json").read_text()).items():
        before = left_behind()
        load = config.load_target if "target" in fields else config.load
        code = gate.run(load(**fields), run_dir=folder / name, quiet=True)
        found = {"exit_code": int(code), "before": before, "after": left_behind()}
        (folder / name / f"process_{os.environ['RANK']}.json").write_text(json.dumps(found))


def left_behind() -> dict[str, object]:
    """What a finished run must leave as it was."""
    wakeup_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup_fd)
    return {
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("tpcompile")),
        "sigterm": str(signal.getsignal(signal.SIGTERM)),
        "wakeup_fd": wakeup_fd,
    }


if __name__ == "__main__":
    main()
