from __future__ import annotations

import os
from collections.abc import Iterator

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


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code from or for other tests, and no code that Dynamo skips."""
    import torch  # many tests do without

    torch.compiler.reset()
    yield
    torch.compiler.reset()
