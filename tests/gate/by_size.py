"""A torchrun target: as many.py, where the table of sums by size has rows for two CPU ranks.

torchrun ... tests/gate/by_size.py FOLDER
"""

from __future__ import annotations

from tests.by_size.rows import IN_FLIGHT
from tests.gate import many
from tpcompile.by_size import setting


def main() -> None:
    """Run the jobs."""
    setting.shipped = lambda: IN_FLIGHT
    many.main()


if __name__ == "__main__":
    main()
