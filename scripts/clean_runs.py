#!/usr/bin/env python
"""False positives: N runs of healthy programs, each must be green; `tpcompile.faults.clean_runs` has the options.

scripts/clean_runs.py --runs 20 --nproc 2 --preset cpu_smoke [--train] [--json FILE]
scripts/clean_runs.py --what sentinel --runs 200 [--programs NAME ...] [--device cuda] [--json FILE]
"""

from tpcompile.faults.clean_runs import main

if __name__ == "__main__":
    raise SystemExit(main())
