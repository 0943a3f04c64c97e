from __future__ import annotations

import os

import pytest

from tpcompile.launch import count_gpus

# Inductor compiles and loads a probe for each vector instruction set, once per cache; torch 2.11 imports torch in a new
# process for each. Every rank with a cache of its own would wait for that. Read when Inductor is imported.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.gpu(n)`: skip where there are fewer than n GPUs."""
    for mark in item.iter_markers("gpu"):
        if count_gpus() < mark.args[0]:
            pytest.skip(f"needs {mark.args[0]} GPU(s), here are {count_gpus()}")
