"""Programs in which an edit changes the result of a launcher although its own text stays: the edit, and what remains.

Each is a package of files; `launch` is in `run.py`. The edit is made in whichever file has its text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

CONSTS = "EPS = 1e-6\nOTHER = 3\n"
EDIT = ("1e-6", "1e-5")


@dataclass(frozen=True)
class Program:
    """A package, and an edit of it."""

    run: str
    files: dict[str, str] = field(default_factory=dict)
    edit: tuple[str, str] = EDIT
    refused: str = ""
    """A part of why its source is refused; empty where the edit must change the hash."""


def _with_consts(run: str, **more: str) -> Program:
    return Program(run, {"consts.py": CONSTS, **more})


DIFFERS = {
    # Defaults of arguments.
    "default from a constant": Program("EPS = 1e-6\ndef launch(x, eps=EPS): return x * eps"),
    "keyword-only default": Program("EPS = 1e-6\ndef launch(x, *, eps=EPS): return x * eps"),
    "conditional default": Program("EPS = 1e-6 if len('a') else 0\ndef launch(x, eps=EPS or 1): return x * eps"),
    "default that is a function": Program("def f(x): return x * 1e-6\ndef launch(x, f=f): return f(x)"),
    "default of a nested function": Program(
        "EPS = 1e-6\ndef launch(x):\n    def f(y, eps=EPS): return y * eps\n    return f(x)"
    ),
    "default that is a cache": Program(
        "E = 1e-6\ndef launch(x, cache={0: E}):\n    cache[1] = x\n    return x * cache[0]"
    ),
    "default that is changed by a method of its own": Program(
        "class C:\n    def __init__(self, e): self.e = e\n    def add(self, x): return x * self.e\nT = C(1e-6)\n"
        "def launch(x, t=T): return t.add(x)"
    ),
    "default that is a tensor": Program("import torch\nE = 1e-6\ndef launch(x, t=torch.ones(2) * E): return x * t"),
    # Values: containers, classes, objects, partials, methods.
    "list": Program("EPS = [1, 1e-6]\ndef launch(x): return x * EPS[1]"),
    "dict": Program("EPS = {'a': {'b': 1e-6}}\ndef launch(x): return x * EPS['a']['b']"),
    "order of a dict": Program(
        "F = {'a': abs, 'b': round}\ndef launch(x):\n    for f in F.values(): x = f(x)\n    return x",
        edit=("'a': abs, 'b': round", "'b': round, 'a': abs"),
    ),
    "set": Program("EPS = {2.0, 1e-6}\ndef launch(x): return x * min(EPS)"),
    "class constant": Program("class C:\n    EPS = 1e-6\ndef launch(x): return x * C.EPS"),
    "class constant of a base": Program(
        "from .base import B\nclass C(B): pass\ndef launch(x): return x * C.EPS",
        {"base.py": "class B:\n    EPS = 1e-6"},
    ),
    "class annotations": Program(
        "from dataclasses import dataclass\n@dataclass\nclass C:\n    eps: float = 1e-6\n"
        "def launch(x): return x * C().eps"
    ),
    "default factory": Program(
        "from dataclasses import dataclass, field\ndef make(): return 1e-6\n@dataclass\nclass C:\n"
        "    eps: float = field(default_factory=make)\ndef launch(x): return x * C().eps"
    ),
    "enum": Program("from enum import Enum\nclass E(Enum):\n    A = 1e-6\ndef launch(x): return x * E.A.value"),
    "enum by name": Program("from enum import Enum\nclass E(Enum):\n    A = 1e-6\n"
    "def launch(x): return x * E['A'].value"),
    "named tuple": Program(
        "from typing import NamedTuple\nclass N(NamedTuple):\n    eps: float = 1e-6\nC = N()\n"
        "def launch(x): return x * C.eps"
    ),
    "namespace": Program(
        "from types import SimpleNamespace\nC = SimpleNamespace(eps=1e-6)\ndef launch(x): return x * C.eps"
    ),
    "partial": Program(
        "from functools import partial\ndef f(x, eps): return x * eps\nG = partial(f, eps=1e-6)\n"
        "def launch(x): return G(x)"
    ),
    "function of a partial": Program(
        "from functools import partial\ndef f(x, k): return x * 1e-6\nG = partial(f, k=1)\ndef launch(x): return G(x)"
    ),
    "partial inside": Program(
        "import functools\ndef f(x, k): return x * 1e-6\ndef launch(x): return functools.partial(f, k=1)(x)"
    ),
    "dict of functions": Program("def f(x): return x * 1e-6\nF = {'a': f}\ndef launch(x, k): return F[k](x)"),
    "static method": Program(
        "class C:\n    @staticmethod\n    def f(x): return x * 1e-6\ndef launch(x): return C.f(x)"
    ),
    "class method": Program(
        "class C:\n    e = 1e-6\n    @classmethod\n    def f(cls, x): return x * cls.e\ndef launch(x): return C.f(x)"
    ),
    "property": Program(
        "class C:\n    @property\n    def e(self): return 1e-6\nO = C()\ndef launch(x): return x * O.e"
    ),
    "bound method": Program(
        "class C:\n    def __init__(self, e): self.e = e\n    def f(self, x): return x * self.e\n"
        "F = C(1e-6).f\ndef launch(x): return F(x)"
    ),
    "method through super": Program(
        "class B:\n    def f(self, x): return x * 1e-6\nclass C(B):\n    def f(self, x): return super().f(x)\n"
        "def launch(x): return C().f(x)"
    ),
    "state of a callable object": Program(
        "class C:\n    def __init__(self, e): self.e = e\n    def __call__(self, x): return x * self.e\n"
        "F = C(1e-6)\ndef launch(x): return F(x)"
    ),
    "code of a callable object": Program(
        "class C:\n    __slots__ = ()\n    def __call__(self, x): return x * 1e-6\nF = C()\n"
        "def launch(x): return F(x)"
    ),
    "slots": Program(
        "class C:\n    __slots__ = ('e',)\n    def __init__(self): self.e = E\nE = 1e-6\nF = C()\n"
        "def launch(x): return x * F.e"
    ),
    "descriptor": Program(
        "class D:\n    def __get__(self, o, k): return 1e-6\nclass C:\n    e = D()\ndef launch(x): return x * C.e"
    ),
    "metaclass": Program(
        "class M(type):\n    def f(cls, x): return x * 1e-6\nclass C(metaclass=M): pass\ndef launch(x): return C.f(x)"
    ),
    # Names that are looked up in other ways, and imports.
    "getattr": _with_consts("from . import consts\ndef launch(x): return x * getattr(consts, 'EPS')"),
    "getattr of a class": Program(
        "class C:\n    EPS = 1e-6\ndef launch(x, n): return x * getattr(C, n)"
    ),
    "operator.attrgetter": Program(
        "from operator import attrgetter\nclass C:\n    a = 1\n    b = 2\nG = attrgetter('a')\n"
        "def launch(x): return x * G(C)",
        edit=("attrgetter('a')", "attrgetter('b')"),
    ),
    "import inside": _with_consts("def launch(x):\n    from .consts import EPS\n    return x * EPS"),
    "import of a module inside": _with_consts("def launch(x):\n    from . import consts as c\n    return x * c.EPS"),
    "absolute import inside": _with_consts("def launch(x):\n    import evader.consts\n"
    "    return x * evader.consts.EPS"),
    "import_module inside": _with_consts(
        "import importlib\ndef launch(x): return x * importlib.import_module('evader.consts').EPS"
    ),
    "import inside a helper": _with_consts(
        "from .helper import f\ndef launch(x): return f(x)",
        **{"helper.py": "def f(x):\n    from .consts import EPS as e\n    return x * e"},
    ),
    "pkg.sub.fn": Program(
        "import evader.sub.deep\ndef launch(x): return evader.sub.deep.f(x)",
        {"sub/__init__.py": "", "sub/deep.py": "def f(x): return x * 1e-6"},
    ),
    "re-exported name": Program(
        "from . import api\ndef launch(x): return api.f(x)",
        {"api.py": "from .deep import f", "deep.py": "def f(x): return x * EPS\nEPS = 1e-6"},
    ),
    "star import": _with_consts("from .consts import *\ndef launch(x): return x * EPS"),
    "module __getattr__": Program(
        "from . import lazy\ndef launch(x): return x * lazy.EPS", {"lazy.py": "def __getattr__(name): return 1e-6"}
    ),
    "other module of the program": Program(
        "import evader_beside\ndef launch(x): return evader_beside.f(x)",
        {"../evader_beside.py": "def f(x): return x * 1e-6"},
    ),
    "method of a dict": Program("F = {'a': 1e-6}.get\ndef launch(x): return x * F('a')"),
    "global inside of a function with a local one": Program(
        "E = 1e-6\ndef launch(x):\n    E = 1\n    def f(y):\n        global E\n        return y * E\n    return f(x)"
    ),
    "one name for two": Program(
        "from .deep import f\ndef launch(x):\n    def g(y):\n        from .other import f\n        return f(y)\n"
        "    return f(x) + g(x)",
        {"deep.py": "def f(x): return x", "other.py": "def f(x): return x * 1e-6"},
    ),
    "one name for two, the other": Program(
        "from .deep import f\ndef launch(x):\n    def g(y):\n        from .other import f\n        return f(y)\n"
        "    return f(x) + g(x)",
        {"deep.py": "def f(x): return x * 1e-6", "other.py": "def f(x): return x"},
    ),
    # Wrappers and decorators.
    "single dispatch": Program(
        "from functools import singledispatch\n@singledispatch\ndef f(x): return x\n@f.register\n"
        "def _(x: int): return x * 1e-6\ndef launch(x): return f(x)"
    ),
    "compiled helper": Program(
        "import torch\n@torch.compile\ndef f(x): return x * 1e-6\ndef launch(x): return f(x)"
    ),
    "opened in the launcher": Program(
        "from pathlib import Path\nHERE = Path(__file__).parent\n"
        "def launch(x):\n    with (HERE / 'e.txt').open('r') as file: return x * float(file.read())",
        {"e.txt": "1e-6"},
    ),
    "wrapping decorator": Program(
        "import functools\ndef deco(f):\n    @functools.wraps(f)\n    def w(x): return f(x) * 1e-6\n    return w\n"
        "@deco\ndef launch(x): return x"
    ),
    "what a decorator wraps": Program(
        "import functools\ndef deco(f):\n    @functools.wraps(f)\n    def w(x): return f(x)\n    return w\n"
        "@deco\ndef launch(x): return x * 1e-6"
    ),
    "wrapped in an attribute": Program(
        "def f(x): return x * 1e-6\ndef launch(x): return launch.__wrapped__(x) + 1\nlaunch.__wrapped__ = f"
    ),
    "argument of a decorator": Program(
        "def deco(e):\n    def d(f):\n        def w(x): return f(x) * e\n        return w\n    return d\n"
        "EPS = 1e-6\n@deco(EPS)\ndef launch(x): return x"
    ),
    "decorator that is a class": Program(
        "import functools\nclass Deco:\n    def __init__(self, f): functools.update_wrapper(self, f)\n"
        "    def __call__(self, x): return self.__wrapped__(x) * 1e-6\n@Deco\ndef f(x): return x\n"
        "def launch(x): return f(x)"
    ),
    "cached helper": Program(
        "import functools\n@functools.cache\ndef f(): return 1e-6\ndef launch(x): return x * f()"
    ),
    "context of a library": Program(
        "import torch\n@torch.no_grad()\ndef f(x): return x * 1e-6\ndef launch(x): return f(x)"
    ),
    "generator context": Program(
        "from contextlib import contextmanager\n@contextmanager\ndef f(): yield 1e-6\n"
        "def launch(x):\n    with f() as e: return x * e"
    ),
    # Closures, lambdas, functions that call each other, and the order of definitions.
    "closure": Program("def make(e):\n    def launch(x): return x * e\n    return launch\nlaunch = make(1e-6)"),
    "nested closure": Program(
        "def make(e):\n    def middle():\n        def inner(x): return x * e\n        return inner\n"
        "    f = middle()\n"
        "    def launch(x): return f(x)\n    return launch\nlaunch = make(1e-6)"
    ),
    "two closures of one function": Program(
        "def make(e):\n    def f(x): return x * e\n    return f\nA, B = make(1e-6), make(2)\n"
        "def launch(x): return A(x) + B(x)"
    ),
    "two closures swapped": Program(
        "def make(e):\n    def f(x): return x * e\n    return f\nA, B = make(1), make(2)\n"
        "def launch(x): return A(x) - B(x)",
        edit=("A, B = make(1), make(2)", "A, B = make(2), make(1)"),
    ),
    "lambda": Program("F = {'a': lambda x: x, 'b': lambda x: x * 1e-6}\ndef launch(x, k): return F[k](x)"),
    "lambdas of one line swapped": Program(
        "F, G = (lambda x: x + 1), (lambda x: x - 1)\ndef launch(x): return F(x)",
        edit=("(lambda x: x + 1), (lambda x: x - 1)", "(lambda x: x - 1), (lambda x: x + 1)"),
    ),
    "mutual recursion": Program(
        "def launch(x): return x if x < 1 else other(x)\ndef other(x): return launch(x * 1e-6)"
    ),
    "defined below": Program("def launch(x): return helper(x) * E\ndef helper(x): return x\nE = 1e-6"),
    "global rebound": Program("EPS = 1\ndef launch(x): return x * EPS\nEPS = 1e-6"),
    "global rebound to another function": Program(
        "def f(x): return x\ndef g(x): return -x\nh = f\ndef launch(x): return h(x)", edit=("h = f", "h = g")
    ),
    "attribute of a function": Program("def launch(x): return x * launch.eps\nlaunch.eps = 1e-6"),
    # Values that have no text, which count by the statements that define them.
    "computed constant": Program("EPS = sum([1e-6, 1])\ndef launch(x): return x * EPS"),
    "tensor": Program("import torch\nT = torch.full((2,), 1e-6)\ndef launch(x): return x * T"),
    "tensor changed as it is made": Program("import torch\nT = torch.ones(2)\nT[0] = 1e-6\n"
    "def launch(x): return x * T"),
    "tensor that a function fills": Program(
        "import torch\nT = torch.ones(2)\ndef fill(t): t[0] = 1e-6\nfill(T)\ndef launch(x): return x * T"
    ),
    "tensor of a function": Program(
        "import torch\ndef make(): return torch.ones(2) * 1e-6\nT = make()\ndef launch(x): return x * T"
    ),
    "tensor of a class": Program(
        "import torch\nclass C:\n    T = torch.full((2,), 1e-6)\ndef launch(x): return x * C.T"
    ),
    "tensor of an import that may fail": Program(
        "try:\n    from .t import T\nexcept ImportError:\n    T = None\ndef launch(x): return x * T",
        {"t.py": "import torch\nT = torch.full((2,), 1e-6)"},
    ),
    "tensor of a star import": Program(
        "from .t import *\ndef launch(x): return x * T", {"t.py": "import torch\nT = torch.full((2,), 1e-6)"}
    ),
    "number of a class of its own": Program("class N(float): pass\nE = N(1e-6)\ndef launch(x): return x * E"),
    "class made by a call": Program(
        "from collections import namedtuple\nC = namedtuple('C', 'eps', defaults=(1e-6,))\n"
        "def launch(x): return x * C().eps"
    ),
    "array": Program("import numpy as np\nT = np.array([1e-6])\ndef launch(x): return x * T"),
    # What the launcher changes, which counts by how it begins.
    "start of a cache": Program(
        "CACHE = {'eps': 1e-6}\ndef launch(x, k):\n    CACHE[k] = x\n    return x * CACHE['eps']"
    ),
    "start of a counter": Program("N = 1e-6\ndef launch(x):\n    global N\n    N += 1\n    return x * N"),
    "argument of an object that changes": Program(
        "class C:\n    def __init__(self, e): self.e, self.n = e, 0\n    def __call__(self, x):\n"
        "        self.n += 1\n"
        "        return x * self.e\nF = C(1e-6)\ndef launch(x): return F(x)"
    ),
    # Files.
    "read when imported": Program(
        "from pathlib import Path\nTEXT = Path(__file__).with_name('e.txt').read_text()\n"
        "def launch(x): return x * float(TEXT)",
        {"e.txt": "1e-6"},
    ),
    "read in the launcher": Program(
        "from pathlib import Path\ndef launch(x): return x * float(Path(__file__).with_name('e.txt').read_text())",
        {"e.txt": "1e-6"},
    ),
    "read by a path in a constant": Program(
        "import os\nFILE = os.path.join(os.path.dirname(__file__), 'e.txt')\n"
        "def launch(x):\n    with open(FILE) as file: return x * float(file.read())",
        {"e.txt": "1e-6"},
    ),
    "read by a path in a variable": Program(
        "from pathlib import Path\nHERE = Path(__file__).parent\n"
        "def launch(x):\n    place = HERE / 'data' / 'e.txt'\n    return x * float(place.read_text())",
        {"data/e.txt": "1e-6"},
    ),
    "source of an extension": Program(
        "from pathlib import Path\nfrom torch.utils.cpp_extension import load\n"
        "CSRC = Path(__file__).with_name('k.cpp')\n"
        "def launch(x): return load(name='k', sources=[str(CSRC)]).run(x)",
        {"k.cpp": "float e = 1e-6;"},
    ),
    # Ops.
    "op of another module": Program(
        "import torch\nfrom . import ops\ndef launch(x): return torch.ops.evader.scale(x)",
        {"ops.py": "import torch\n@torch.library.custom_op('evader::scale', mutates_args=())\n"
         "def scale(x: torch.Tensor) -> torch.Tensor: return x * 1e-6"},
    ),
    "autograd function": Program(
        "import torch\nclass F(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, x): return x * 1e-6\n"
        "def launch(x): return F.apply(x)"
    ),
}  # fmt: skip
"""The edit must change the hash."""

_REGISTRY = (
    "class Registry:\n    def __init__(self): self.d = {}\n    def register(self, n):\n        def decorate(f):\n"
    "            self.d[n] = f\n            return f\n        return decorate\n    def get(self, n): return self.d[n]\n"
    "REG = Registry()\nR = {}\ndef reg(n):\n    def decorate(f):\n        R[n] = f\n        return f\n"
    "    return decorate\n"
)
_SETTINGS = (
    "class Settings:\n    def __init__(self): self.v = {'f': 1}\n    def set(self, k, v): self.v[k] = v\n"
    "    def get(self, k): return self.v[k]\nCFG = Settings()\nCACHE = {}\n"
)


def _filled(run: str, text: str, fill: str, edit: tuple[str, str] = EDIT) -> Program:
    """What `filled.py` defines is filled by `fill.py` while it is imported."""
    return Program(f"from . import filled, fill\n{run}", {"filled.py": text, "fill.py": fill}, edit)


FILLED = {
    "registry": _filled(
        "def launch(x): return filled.REG.get('a')(x)", _REGISTRY,
        "from .filled import REG\n@REG.register('a')\ndef a(x): return x * 1e-6",
    ),
    "name in a registry": _filled(
        "def launch(x): return filled.REG.get('a')(x)", _REGISTRY,
        "from .filled import REG\n@REG.register('a')\ndef a(x): return x\n"
        "@REG.register('b')\ndef b(x): return x * 2\nREG.d['a'] = a",
        edit=("REG.d['a'] = a", "REG.d['a'] = b"),
    ),
    "registry that counts its uses": _filled(
        "def launch(x): return filled.REG.get('a')(x)",
        _REGISTRY.replace("self.d = {}", "self.d, self.n = {}, 0").replace(
            "def get(self, n): return", "def get(self, n):\n        self.n += 1\n        return"
        ),
        "from .filled import REG\n@REG.register('a')\ndef a(x): return x * 1e-6",
    ),
    "registry of tensors and functions": _filled(
        "def launch(x): return filled.REG.get('a')(x)", _REGISTRY,
        "import torch\nfrom .filled import REG\n@REG.register('a')\ndef a(x): return x * 1e-6\n"
        "REG.register('t')(torch.ones(2))",
    ),
    "dict that a decorator and the launcher fill": _filled(
        "def launch(x):\n    filled.R.setdefault('z', lambda x: x)\n    return filled.R['a'](x)", _REGISTRY,
        "from .filled import reg\n@reg('a')\ndef a(x): return x * 1e-6",
    ),
    "settings": _filled(
        "def launch(x): return x * filled.CFG.get('f')", _SETTINGS, "from .filled import CFG\nCFG.set('f', 1e-6)"
    ),
    "settings that the launcher sets": _filled(
        "def launch(x):\n    filled.CFG.set('g', x)\n    return x * filled.CFG.get('f')", _SETTINGS,
        "from .filled import CFG\nCFG.set('f', 1e-6)",
    ),
    "start of a cache": _filled(
        "def launch(x):\n    filled.CACHE.setdefault('b', 1)\n    return x * filled.CACHE['a']", _SETTINGS,
        "from . import filled\nfilled.CACHE['a'] = 1e-6",
    ),
    "tensor": _filled(
        "def launch(x): return x * filled.T", "import torch\nT = torch.ones(1)\n",
        "from . import filled\nfilled.T.fill_(1e-6)",
    ),
}  # fmt: skip
"""What other modules fill while they are imported: values, and code."""
DIFFERS |= {f"filled elsewhere: {name}": program for name, program in FILLED.items()}


PLACE = "Path(__file__).with_name('c.txt')"


def _read(call: str, package: str = "import numpy as np") -> Program:
    """A file whose bytes are read by a call, with arguments that are no modes although they have their letters."""
    return Program(
        f"from pathlib import Path\n{package}\ndef launch(x): return x * {call.replace('FILE', PLACE)}",
        {"c.txt": "1e-6"},
    )


DIFFERS |= {
    "numpy.fromfile": _read("np.fromfile(FILE, 'float32')"),
    "numpy.loadtxt": _read("np.loadtxt(FILE, 'float64')"),
    "numpy.genfromtxt": _read("np.genfromtxt(FILE, 'float64')"),
    "numpy.memmap": _read("np.memmap(FILE, 'a1', 'r')"),
    "torch.load": _read("torch.load(FILE, 'meta')", "import torch"),
    "linecache": _read("float(linecache.getline(str(FILE), 1))", "import linecache"),
    "io.FileIO": _read("float(io.FileIO(FILE).read())", "import io"),
}


def _state(package: str, base: str, value: str, edit: tuple[str, str] = EDIT) -> Program:
    return Program(f"import {package}\nclass S({base}): pass\nO = {value}\ndef launch(x): return x * O", edit=edit)


DIFFERS |= {
    "bytearray of its own": _state("array", "bytearray", "S([3])", ("[3]", "[4]")),
    "array of its own": _state("array", "array.array", "S('d', [1e-6])"),
    "numpy array of its own": _state("numpy as np", "np.ndarray", "np.array([1e-6]).view(S)"),
    "decimal of its own": _state("decimal", "decimal.Decimal", "S('1e-6')"),
    "random numbers of its own": _state("random", "random.Random", "S(3)", ("S(3)", "S(4)")),
    "tensor of its own": _state("torch", "torch.Tensor", "torch.full((1,), 1e-6).as_subclass(S)"),
    "parameter of its own": _state("torch", "torch.nn.Parameter", "S(torch.full((1,), 1e-6))"),
    "attribute of a dict of its own": Program(
        "class S(dict):\n    def __init__(self, e): self.e = e\nO = S(1e-6)\ndef launch(x): return x * O.e"
    ),
    "structure of C": Program(
        "import ctypes\nclass S(ctypes.Structure):\n    _fields_ = [('e', ctypes.c_double)]\nO = S(e=1e-6)\n"
        "def launch(x): return x * O.e\n"
    ),
    "data class made by a call": Program(
        "import dataclasses\nC = dataclasses.make_dataclass('C', [('e', float, 1e-6)])\n"
        "def launch(x): return x * C().e"
    ),
    "class made by types.new_class": Program(
        "import types\nC = types.new_class('C', (), {}, lambda names: names.update(e=1e-6))\n"
        "def launch(x): return x * C.e"
    ),
    "class that names a library's module": Program(
        "class C:\n    __module__ = 'torch.nn.modules.x'\n    def __call__(self, x): return x * 1e-6\n"
        "def launch(x): return C()(x)"
    ),
    "method of an exception": Program(
        "class E(Exception):\n    def e(self): return 1e-6\ndef launch(x):\n    try: raise E()\n"
        "    except E as error: return x * error.e()"
    ),
    "bases of an exception": Program(
        "from .errors import A, B\ndef launch(x):\n    try: raise A\n    except B: return x\n"
        "    except Exception: return -x",
        {"errors.py": "class B(Exception): pass\nclass A(B): pass"}, edit=("class A(B)", "class A(Exception)"),
    ),
    "cached property that is set": Program(
        "import functools\nclass C:\n    @functools.cached_property\n    def e(self): return 1\nO = C()\n"
        "O.e = 1e-6\n"
        "def launch(x): return x * O.e"
    ),
    "special method that is set": Program(
        "from . import k, sets\ndef launch(x): return x * len(k.K())",
        {"k.py": "class K: pass",
         "sets.py": "import functools\nfrom . import k\nk.K.__len__ = functools.partialmethod(lambda s, n: n, 3)"},
        edit=("n, 3)", "n, 4)"),
    ),
}  # fmt: skip

TRITON = {
    "constexpr default": Program(
        "EPS = 1e-6\n@triton.jit\ndef k(x, E: tl.constexpr = EPS): tl.store(x, E)\ndef launch(x): k[(1,)](x)"
    ),
    "constexpr": Program(
        "EPS = tl.constexpr(1e-6)\n@triton.jit\ndef k(x): tl.store(x, EPS)\ndef launch(x): k[(1,)](x)"
    ),
    "constexpr of a module": Program(
        "from . import consts\n@triton.jit\ndef k(x): tl.store(x, consts.EPS)\ndef launch(x): k[(1,)](x)",
        {"consts.py": "import triton.language as tl\nEPS = tl.constexpr(1e-6)"},
    ),
    "dict of kernels": Program(
        "@triton.jit\ndef k(x): tl.store(x, 1e-6)\nK = {'a': k}\ndef launch(x, n): K[n][(1,)](x)"
    ),
    "list of kernels": Program(
        "@triton.jit\ndef k(x): tl.store(x, 1e-6)\nK = [k]\ndef launch(x): [f[(1,)](x) for f in K]"
    ),
    "kernel in a partial": Program(
        "from functools import partial\n@triton.jit\ndef k(x): tl.store(x, 1e-6)\ndef on(f, x): f[(1,)](x)\n"
        "G = partial(on, k)\ndef launch(x): G(x)"
    ),
    "kernel of a class": Program(
        "class C:\n    @staticmethod\n    @triton.jit\n    def k(x): tl.store(x, 1e-6)\ndef launch(x): C.k[(1,)](x)"
    ),
    "configurations of an autotuner": Program(
        "CONFIGS = [triton.Config({'B': 64})]\n@triton.autotune(configs=CONFIGS, key=[])\n@triton.jit\n"
        "def k(x, B: tl.constexpr): tl.store(x, B)\ndef launch(x): k[(1,)](x)",
        edit=("'B': 64", "'B': 128"),
    ),
    "autotuner that is called": Program(
        "WARPS = 4\n@triton.jit\ndef k(x): tl.store(x, 1)\n"
        "t = triton.autotune([triton.Config({}, num_warps=WARPS)], [])(k)\n"
        "def launch(x): t[(1,)](x)",
        edit=("WARPS = 4", "WARPS = 8"),
    ),
    "heuristics": Program(
        "@triton.heuristics({'B': lambda args: 64})\n@triton.jit\ndef k(x, B: tl.constexpr): tl.store(x, B)\n"
        "def launch(x): k[(1,)](x)",
        edit=("args: 64", "args: 128"),
    ),
    "option of jit": Program(
        "NAMES = ['n']\n@triton.jit(do_not_specialize=NAMES)\ndef k(x, n, m): tl.store(x, n)\n"
        "def launch(x): k[(1,)](x, 1, 1)",
        edit=("['n']", "['m']"),
    ),
    "annotation": Program(
        "T = tl.constexpr\n@triton.jit\ndef k(x, B: T): tl.store(x, B)\ndef launch(x): k[(1,)](x, B=1)",
        edit=("T = tl.constexpr", "T = int"),
    ),
    "element type in a dict": Program(
        "D = {0: tl.float32}\n@triton.jit\ndef k(x, D: tl.constexpr): tl.store(x, tl.full([], 1, D))\n"
        "def launch(x): k[(1,)](x, D=D[0])",
        edit=("tl.float32", "tl.float16"),
    ),
}
"""The same, with Triton's kernels; `triton` and `tl` are imported."""

REFUSED = {
    "computed name": Program(
        "from . import consts\ndef launch(x, n): return x * getattr(consts, n)", {"consts.py": CONSTS},
        refused=r"evader\.run\.launch .* consts, a module, is used as a value",
    ),
    "module in a variable": Program(
        "from . import consts\ndef launch(x):\n    c = consts\n    return x * c.EPS", {"consts.py": CONSTS},
        refused=r"consts, a module, is used as a value",
    ),
    "attrgetter of a module": Program(
        "from operator import attrgetter\nfrom . import consts\nG = attrgetter('EPS')\n"
        "def launch(x): return x * G(consts)",
        {"consts.py": CONSTS}, refused=r"consts, a module, is used as a value",
    ),
    "vars of a module": Program(
        "from . import consts\ndef launch(x): return x * vars(consts)['EPS']", {"consts.py": CONSTS},
        refused=r"consts, a module, is used as a value",
    ),
    "module in a dict": Program(
        "from . import consts\nM = {'c': consts}\ndef launch(x): return x * M['c'].EPS", {"consts.py": CONSTS},
        refused=r"what evader\.run\.M, as defined runs .*: consts, a module, is used as a value",
    ),
    "globals": Program("EPS = 1e-6\ndef launch(x): return x * globals()['EPS']", refused=r"it calls globals\(\)"),
    "eval": Program("EPS = 1e-6\ndef launch(x): return x * eval('EPS')", refused=r"it calls eval\(\)"),
    "computed import": Program(
        "import importlib\ndef launch(x, n): return x * importlib.import_module(n).EPS", {"consts.py": CONSTS},
        refused=r"importlib\.import_module\(n\) imports what is computed",
    ),
    "sys.modules": Program(
        "import sys\nfrom . import consts\ndef launch(x): return x * sys.modules['evader.consts'].EPS",
        {"consts.py": CONSTS}, refused=r"sys\.modules is searched",
    ),
    "computed file": Program(
        "def launch(x, place): return x * float(open(place).read())", {"e.txt": "1e-6"},
        refused=r"evader\.run\.launch reads a file whose name is computed, in `open\(place\)`: declare what it reads",
    ),
    "file in a helper": Program(
        "def read(place): return place.read_text()\ndef launch(x, place): return x * float(read(place))",
        {"e.txt": "1e-6"}, refused=r"evader\.run\.read reads a file whose name is computed, in `place\.read_text\(\)`",
    ),
    "function without a source": Program(
        "made = {}\nexec('def f(x): return x * 1e-6', made)\nf = made['f']\ndef launch(x): return f(x)",
        refused=r"what evader\.run\.made, as defined runs cannot be told from its source: it calls exec\(\)",
    ),
    "tensor in a closure": Program(
        "import torch\ndef make(t):\n    def launch(x): return x * t\n    return launch\n"
        "launch = make(torch.full((2,), 1e-6))",
        refused=r"what t, which .*make\.<locals>\.launch refers to, stands for cannot be told: it is a torch\.Tensor",
    ),
    "tensor in a default": Program(
        "import torch\ndef make(e):\n    def launch(x, t=torch.ones(2) * e): return x * t\n    return launch\n"
        "launch = make(1e-6)",
        refused=r"the default of t in .*launch cannot be told: e is a variable of the function around it",
    ),
    "variable of the function around it": Program(
        "def make(n):\n    def launch(x):\n        nonlocal n\n        n += 1\n        return x * n\n"
        "    return launch\n"
        "launch = make(1e-6)",
        refused=r"what n, which .*launch refers to, stands for cannot be told: it is changed while the program runs",
    ),
    "settings in a file": Program(
        "import configparser\ndef launch(x):\n    c = configparser.ConfigParser()\n    c.read('c.ini')\n"
        "    return x * float(c['a']['b'])",
        refused=r"reads a file whose name is computed, in `configparser\.ConfigParser\(\)`",
    ),
    "program that is run": Program(
        "import subprocess\ndef launch(x): return x * float(subprocess.check_output(['cat', 'c.txt']))",
        refused=r"reads a file whose name is computed, in `subprocess\.check_output",
    ),
    "resource of a package": Program(
        "import pkgutil\ndef launch(x): return x * float(pkgutil.get_data('evader', 'c.txt'))",
        refused=r"reads a file whose name is computed, in `pkgutil\.get_data",
    ),
    "variables of a frame": Program(
        "import sys\nC = 1e-6\ndef launch(x): return x * sys._getframe().f_globals['C']",
        refused=r"it searches sys\._getframe\(\)\.f_globals",
    ),
    "variables of a function": Program(
        "C = 1e-6\ndef f(): pass\ndef launch(x): return x * f.__globals__['C']",
        refused=r"it searches f\.__globals__",
    ),
    "classes that were made": Program(
        "class B: pass\nclass C(B):\n    e = 1e-6\ndef launch(x): return x * B.__subclasses__()[0].e",
        refused=r"it searches B\.__subclasses__",
    ),
    "method of a data class without a source": Program(
        "import dataclasses\n@dataclasses.dataclass\nclass K:\n    a: int = 1\nmade = {}\n"
        "exec('def go(s, x): return x * 1e-6', made)\nK.go = made['go']\ndef launch(x): return K().go(x)",
        refused=r"it calls exec\(\)",
    ),
    "op of torch.library.Library": Program(
        "import torch\nL = torch.library.Library('evader_defined', 'FRAGMENT')\n"
        "if not hasattr(torch.ops.evader_defined, 'f'):\n"
        "    L.define('f(Tensor x) -> Tensor')\n    L.impl('f', lambda x: x * 1e-6, 'CPU')\n"
        "def launch(x): return torch.ops.evader_defined.f(x)",
        refused=r"the op evader_defined::f of torch\.library\.Library",
    ),
}  # fmt: skip
"""What runs cannot be told: it is refused, with the name."""

SAME = {
    "unrelated constant": Program(
        "from . import consts\ndef launch(x): return x * consts.EPS",
        {"consts.py": CONSTS},
        edit=("OTHER = 3", "OTHER = 4"),
    ),
    "comment and layout": Program("def launch(x):\n    return x*2  # 1e-6"),
    "unrelated function": Program("def launch(x): return x\ndef other(x): return x * 1e-6"),
    "unrelated method of a static one": Program(
        "class C:\n    @staticmethod\n    def f(x): return x\n    def g(self): return 1e-6\n"
        "def launch(x): return C.f(x)"
    ),
    "attribute with the name of a global": Program("shape = 1e-6\ndef launch(x): return x.shape"),
    "local variable with the name of a global": Program("eps = 1e-6\ndef launch(x):\n    eps = 1\n"
    "    return x * eps"),
    "variable of a comprehension": Program("i = 1e-6\ndef launch(x): return [i for i in x]"),
    "type of an argument": Program("class C:\n    a = 1e-6\ndef launch(x: C) -> C: return x"),
    "message of an exception": Program(
        "class E(Exception):\n    code = 1e-6\ndef launch(x):\n    if x: raise E('no')\n    return x"
    ),
    "package that is not installed": Program(
        "def launch(x):\n    try:\n        import no_such_package as p\n    except ImportError:\n        return x\n"
        "    return p.f(x)\nE = 1e-6"
    ),
    "environment that is changed": Program(
        "import os\ndef launch(x):\n    os.environ['A'] = 'b'\n    return x\nE = 1e-6"
    ),
    "object that raises when it is looked at": Program(
        "class C:\n    def __getattr__(self, name): raise RuntimeError(name)\n    def f(self, x): return x\nO = C()\n"
        "def launch(x): return O.f(x)\nE = 1e-6"
    ),
    "fixed by the launcher": Program("EPS = 1e-6\ndef f(x, eps=0): return x * eps\ndef launch(x): return f(x, 1)"),
}  # fmt: skip
"""An edit that changes no result leaves the hash."""


def uses_libraries(x: float) -> float:
    """Calls two libraries besides torch and the standard one."""
    import numpy as np
    from pydantic import TypeAdapter

    return TypeAdapter(float).validate_python(np.sqrt(x)) * math.pi * torch.pi
