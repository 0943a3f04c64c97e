#!/usr/bin/env python
"""False positives: N runs of healthy programs, each must be green; `tests.faults.clean_runs` has the options.

scripts/clean_runs.py --runs 20 --nproc 2 --preset cpu_smoke [--train] [--json FILE]
scripts/clean_runs.py --what sentinel --runs 200 [--programs NAME ...] [--device cuda] [--json FILE]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.faults.clean_runs import main

if __name__ == "__main__":
    raise SystemExit(main())
