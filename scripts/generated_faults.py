#!/usr/bin/env python
"""Generated faults of rank divergence, drawn from seeds: the verdicts of the sentinel, diagnose and check_ranks.

    scripts/generated_faults.py --seeds 0-199 --jobs 2 --json OUT
    scripts/generated_faults.py --kind healthy --seeds 0-199
    scripts/generated_faults.py --seeds 17 --routes sentinel --keep runs/generated
    scripts/generated_faults.py --list

Seeds from 1000 on are held out: they are run once, and their result is committed unchanged.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.faults.drawn.main import main

if __name__ == "__main__":
    raise SystemExit(main())
