"""`import tpcompile`: light, and everything that it offers is there."""

from __future__ import annotations

import re
import subprocess
import sys

import tpcompile


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, tpcompile; dir(tpcompile); print(sorted({'torch', 'pydantic', 'rich'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_that_it_offers_is_there_and_described() -> None:
    for name in tpcompile.__all__:
        assert getattr(tpcompile, name).__doc__, name
        assert re.search(rf"^(\w+, )?{name}\b", tpcompile.__doc__ or "", re.MULTILINE), name


def test_a_name_that_it_does_not_offer_is_an_attribute_error() -> None:
    assert not hasattr(tpcompile, "chekc")
