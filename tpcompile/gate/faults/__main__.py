"""`python -m tpcompile.gate.faults NAME | list`: the part of `tpcompile gate --fault` that imports torch."""

from __future__ import annotations

from tpcompile.cli import ending
from tpcompile.gate import faults
from tpcompile.report.stdout import say

app = ending.new_app()


@app.command()
def main(name: str) -> None:
    """Print a line per fault for `list`. Raises ConfigError where no fault has the name."""
    if name != "list":
        faults.find(name)
        return
    for fault in faults.ALL.values():
        say(f"{fault.name}\t{fault.what}")


if __name__ == "__main__":
    ending.run(app, "tpcompile gate --fault")
