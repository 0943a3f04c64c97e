"""`tpcompile certify` with the cases of the fast paths that ship, tests/fastpath/shipped.py: writes their certificates.

python scripts/certify_shipped.py add_rms_norm
python scripts/certify_shipped.py qkv_pack_rmsnorm_rope --tp 1 --check

Certificates that were made before there was this script say `tpcompile certify NAME`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    if len(sys.argv) == 1 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    os.chdir(ROOT)  # where Python finds `tests`
    name, *options = sys.argv[1:]
    command = ["-m", "tpcompile", "certify", name, "--import", "tests.fastpath.shipped", *options]
    os.execv(sys.executable, [sys.executable, *command])
