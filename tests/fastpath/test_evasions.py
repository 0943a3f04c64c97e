"""The hash of a launcher: an edit that changes a result changes it, or the source is refused by name; others do not."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fastpath.evasions import DIFFERS, REFUSED, SAME, TRITON, Program
from tpcompile.errors import ConfigError
from tpcompile.fastpath.source import Source, source_of

_TRITON = "import triton\nimport triton.language as tl\n"


@pytest.fixture(autouse=True)
def modules_of_the_program() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("evader", "evader_beside")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def written(folder: Path, program: Program, *, edited: bool = False, head: str = "") -> Path:
    """The program in a folder, with or without its edit."""
    texts = {"__init__.py": "", "run.py": head + program.run, **program.files}
    assert sum(program.edit[0] in text for text in texts.values()) == 1 or program in REFUSED.values()
    for name, text in texts.items():
        file = folder / "evader" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace(*program.edit) if edited else text)
    return folder


def source(folder: Path, **options: object) -> Source:
    """Of the launcher of the program in a folder."""
    forget()
    sys.path.insert(0, str(folder))
    try:
        return source_of(importlib.import_module("evader.run").launch, **options)  # type: ignore[arg-type]
    finally:
        sys.path.remove(str(folder))


def both(folder: Path, program: Program, head: str = "") -> tuple[Source, Source]:
    before = written(folder / "before", program, head=head)
    after = written(folder / "after", program, edited=True, head=head)
    return source(before), source(after)


@pytest.mark.parametrize("name", DIFFERS)
def test_an_edit_that_changes_the_result_changes_the_hash(name: str, tmp_path: Path) -> None:
    before, after = both(tmp_path, DIFFERS[name])
    assert (before.refused, after.refused) == ("", "")
    assert before.sha256 != after.sha256


@pytest.mark.parametrize("name", TRITON)
def test_so_does_one_of_what_a_kernel_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    before, after = both(tmp_path, TRITON[name], _TRITON)
    assert (before.refused, after.refused) == ("", "")
    assert before.sha256 != after.sha256 and any(kernel.endswith(".k") for kernel in before.kernels)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused_by_name(name: str, tmp_path: Path) -> None:
    found = source(written(tmp_path, REFUSED[name]))
    assert re.search(REFUSED[name].refused, found.refused), found.refused


@pytest.mark.parametrize("name", SAME)
def test_an_edit_that_changes_no_result_leaves_the_hash(name: str, tmp_path: Path) -> None:
    before, after = both(tmp_path, SAME[name])
    assert (before.refused, before.sha256) == ("", after.sha256)


@pytest.mark.parametrize("name", DIFFERS | SAME)
def test_the_hash_does_not_depend_on_the_folder(name: str, tmp_path: Path) -> None:
    program = (DIFFERS | SAME)[name]
    here, there = (written(tmp_path / folder, program) for folder in ("here", "some/where/else"))
    assert source(here).sha256 == source(there).sha256


IN_A_PROCESS = """
import json, sys
from pathlib import Path
from tests.fastpath import test_evasions
names = json.load(sys.stdin)
print(json.dumps({name: test_evasions.source(Path(folder)).sha256 for name, folder in reversed(names.items())}))
"""


def test_the_hash_does_not_depend_on_the_process_and_the_order_of_imports(tmp_path: Path) -> None:
    folders = {name: str(written(tmp_path / str(at), program)) for at, (name, program) in enumerate(DIFFERS.items())}
    here = {name: source(Path(folder)).sha256 for name, folder in folders.items()}
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    environ = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", IN_A_PROCESS]
    ended = subprocess.run(
        command, input=json.dumps(folders), env=environ, capture_output=True, text=True, timeout=100, check=True
    )
    assert json.loads(ended.stdout) == here


USED = {
    "cache": "CACHE = {}\ndef launch(x):\n    CACHE[x] = x\n    return x",
    "cache of an import": "from .state import CACHE\ndef launch(x):\n    CACHE.setdefault(x, len(CACHE))\n    return x",
    "counter": "N = 0\ndef launch(x):\n    global N\n    N += 1\n    return x + N",
    "counter of a module": "from . import state\ndef launch(x):\n    state.N += 1\n    return x + state.N",
    "numbers": "import itertools\nN = itertools.count()\ndef launch(x): return x + next(N)",
    "defaults": "from collections import defaultdict\nD = defaultdict(list)\ndef launch(x): return D[x]",
    "object": "class C:\n    def __init__(self): self.n = 0\n    def __call__(self):\n        self.n += 1\n"
    "C0 = C()\ndef launch(x): return C0()",
    "object with a cache": "class C:\n    def __init__(self): self.c = {}\n    def __call__(self, x):\n"
    "        self.c[x] = x\nC0 = C()\ndef launch(x): return C0(x)",
    "cached property": "import functools\nclass C:\n    @functools.cached_property\n    def n(self): return 1\n"
    "C0 = C()\ndef launch(x): return x + C0.n",
    "lru_cache": "import functools\n@functools.lru_cache\ndef f(x): return x\ndef launch(x): return f(x)",
    "default argument": "def launch(x, cache={}):\n    cache[x] = x\n    return x",
    "attribute of the function": "def launch(x):\n    launch.n += 1\n    return x\nlaunch.n = 0",
    "counter of a class": "class C:\n    n = 0\ndef launch(x):\n    C.n += 1\n    return x + C.n",
    "lock": "import threading\nL = threading.Lock()\ndef launch(x):\n    with L: return x",
    "weak references": "import weakref\nW = weakref.WeakValueDictionary()\ndef launch(x): return W.get(x)",
    "logger": "import logging\nL = logging.getLogger('a')\ndef launch(x): L.info('x')",
    "context variable": "from contextvars import ContextVar\nV = ContextVar('v', default=1)\ndef launch(x):\n"
    "    V.set(x)\n    return V.get()",
    "state of torch": "import torch\ndef launch(x): return x + torch.backends.cudnn.enabled + torch.get_num_threads()",
    "registry that counts its uses": "class R:\n    def __init__(self): self.d, self.n = {}, 0\n"
    "    def register(self, f): self.d['a'] = f\n    def get(self):\n        self.n += 1\n        return self.d['a']\n"
    "REG = R()\ndef f(x): return x\nREG.register(f)\ndef launch(x): return REG.get()(x)",
    "cache of functions": "import functools\nCACHE = {}\ndef f(x): return x\ndef launch(x):\n"
    "    CACHE[x] = functools.partial(f) if x > 1 else f\n    return CACHE.setdefault(-x, lambda x: x)(x)",
    "exception": "class Err(Exception): pass\nLAST = []\ndef launch(x):\n    try: raise Err(x)\n"
    "    except Err as error: LAST.append(error)",
    "environment": "import os\ndef launch(x): return os.environ.get('A', x)",
}
"""What changes while a program runs."""


@pytest.mark.parametrize("name", USED)
def test_what_changes_while_the_program_runs_leaves_the_hash(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, Program(USED[name] + "\nE = 1e-6", {"state.py": "CACHE = {}\nN = 0"}))
    before = source(folder)
    launch = sys.modules["evader.run"].launch
    for x in (1, 2):
        launch(x)
    assert before.refused == "" and source_of(launch) == before


ORDERS = {
    "of functions": ("R = {}", "from .state import R\ndef f(x): return x\nR['NAME'] = f"),
    "of classes": (
        "import functools\n@functools.singledispatch\ndef R(x): return x",
        "from .state import R\nclass NAME: pass\n@R.register(NAME)\ndef f(x): return x",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_imports_that_fill_a_mapping_does_not_count(name: str, tmp_path: Path) -> None:
    state, fills = ORDERS[name]
    files = {"state.py": state, "a.py": fills.replace("NAME", "A"), "b.py": fills.replace("NAME", "B")}
    program = Program("from . import a, b\nfrom .state import R\ndef launch(x): return R, 1e-6", files)
    found = []
    for order in ("a, b", "b, a"):
        files["__init__.py"] = f"from . import {order}"
        found.append(source(written(tmp_path / order[0], program)))
    assert found[0] == found[1] and found[0].refused == ""


def test_what_a_library_has_counts_by_its_name_and_version() -> None:
    found = source_of(importlib.import_module("tests.fastpath.evasions").uses_libraries)
    assert found.refused == "" and set(found.libraries) == {"numpy", "pydantic"}


def test_a_file_that_is_declared_counts(tmp_path: Path) -> None:
    folder = written(tmp_path, REFUSED["computed file"])
    before = source(folder, files=("e.txt",))
    (folder / "evader" / "e.txt").write_text("1e-5")
    after = source(folder, files=("e.txt",))
    assert (before.refused, after.refused) == ("", "") and before.sha256 != after.sha256
    with pytest.raises(ConfigError, match=r"f\.txt .*evader/f\.txt"):
        source(folder, files=("f.txt",))
