from __future__ import annotations

import pytest

from tpcompile.launch import count_gpus


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.gpu(n)`: skip where there are fewer than n GPUs."""
    for mark in item.iter_markers("gpu"):
        if count_gpus() < mark.args[0]:
            pytest.skip(f"needs {mark.args[0]} GPU(s), here are {count_gpus()}")
