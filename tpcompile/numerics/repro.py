"""A part of a graph that is wrong where it is compiled -> a file of torch alone that shows it, and what it does.

The file prints both values and ends with 1 where compiled is wrong, with 0 where it is right. With the argument
`bisect` it also runs torch's own `CompilerBisector` on itself, which names the layer.
"""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpcompile.numerics.smallest import Part
from tpcompile.numerics.wrong_op import tolerance_of
from tpcompile.torch_api.comparing import Settings, added, expression

_FOUND = "bisected: "
_PLAIN = (bool, int, float, str, type(None))
_TEMPLATE = '''"""{title}

torch {torch}. Search https://github.com/pytorch/pytorch/issues for: {words}
Prints the value in eager and compiled; exit code 1 where they differ. `bisect` names the layer of the compiler.
"""

import base64
import importlib
import io
import json
import operator
import sys

import torch
import torch._functorch.config
import torch._inductor.config
import torch._inductor.decomposition
import torch._inductor.lowering
from torch import device, inf, nan, tensor  # names in the graph

sys.path[:0] = {path!r}
ADDED = [importlib.import_module(name) for name in {modules!r}]  # passes, lowerings, ... that are not torch's
for name, value in {settings!r}.items():
    setattr(torch._inductor.config, name, value)
{additions}
torch._inductor.config.fallback_random = True  # the random numbers of eager
torch._inductor.config.fx_graph_cache = False
torch._functorch.config.enable_autograd_cache = False
INPUTS = torch.load(io.BytesIO(base64.b64decode(
    {inputs}
)))


class Graph(torch.nn.Module):
{code}


def run(program):
    inputs = [one.detach().clone().requires_grad_(one.requires_grad) for one in INPUTS]
    with torch.set_grad_enabled({in_backward}):
        torch.manual_seed(0)
        found = list(program(*inputs))
        if {in_backward}:
            ends = [one for one in found if one.requires_grad]
            starts = [one for one in inputs if one.requires_grad]
            torch.manual_seed(0)
            found += torch.autograd.grad(ends, starts, [torch.randn_like(one) for one in ends], allow_unused=True)
    return [one.detach() for one in [*found, *inputs] if one is not None]


def differ(one, other):
    if not other.is_floating_point():
        return not torch.equal(one, other)
    apart = (one.double() - other.double()).norm()
    return not apart <= {tolerance!r} * other.double().norm()


def fails():
    torch._dynamo.reset()
    wanted = run(Graph())
    got = run(torch.compile(Graph(), backend={backend}, dynamic=False))
    wrong = [pair for pair in zip(got, wanted) if differ(*pair)]
    for one, other in wrong[:1]:
        print("compiled:", one)
        print("eager:   ", other)
    return bool(wrong)


if __name__ == "__main__":
    is_wrong = fails()
    print("compiled is wrong" if is_wrong else "compiled is right", "in torch", torch.__version__)
    if is_wrong and "bisect" in sys.argv:
        from torch._inductor.compiler_bisector import CompilerBisector

        found = CompilerBisector.do_bisect(lambda: not fails())
        fields = [found.backend, found.subsystem, str(found.debug_info or "")] if found else ["", "", ""]
        print({found!r} + json.dumps(fields))
    sys.exit(is_wrong)
'''


class Ran(NamedTuple):
    """What the file did."""

    fails: bool | None
    """None where it did not end in time."""
    backend: str = ""
    subsystem: str = ""
    """Both as torch's bisector names them; empty where it found nothing."""
    detail: str = ""


def write(path: Path, part: Part, *, settings: Settings, backend: Any, title: str, words: str) -> None:
    """Write the file; a function among the settings is found again in its module."""
    in_backward = any(one.in_backward for one in part.differences)
    dtypes = [one.wanted.dtype for one in part.differences if isinstance(one.wanted, Tensor)]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    plain = {name: value for name, value in settings.items() if isinstance(value, _PLAIN)}
    additions = added(backend, settings)
    modules = sorted({one.module for one in additions})
    code = [f"    {line}" if line.strip() else "" for line in part.module.code.strip().splitlines()]
    text = _TEMPLATE.format(
        title=title,
        torch=torch.__version__,
        words=words,
        path=[one for one in sys.path if one] if modules else [],
        modules=modules,
        settings=plain,
        additions="\n".join(one.line for one in additions if one.line),
        inputs="\n    ".join(_in_base64(part.inputs)),
        code="\n".join(code),
        in_backward=in_backward,
        tolerance=max(map(tolerance_of, floats), default=tolerance_of(torch.float32)),
        backend=repr(backend) if isinstance(backend, str) else expression(backend),
        found=_FOUND,
    )
    path.write_text(text)


def _in_base64(inputs: Sequence[Tensor]) -> list[str]:
    buffer = io.BytesIO()
    torch.save(list(inputs), buffer)
    text = base64.b64encode(buffer.getvalue()).decode()
    return [f'"{text[start : start + 100]}"' for start in range(0, len(text), 100)]


def ran(path: Path, *, timeout_s: float) -> Ran:
    """Run the file, with the bisection of the compiler's layers."""
    command = [sys.executable, str(path), "bisect"]
    try:
        ended = subprocess.run(command, timeout=timeout_s, check=False, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return Ran(None)
    fails = ended.returncode == 1 and "compiled is wrong" in ended.stdout
    lines = [line.removeprefix(_FOUND) for line in ended.stdout.splitlines() if line.startswith(_FOUND)]
    return Ran(fails, *json.loads(lines[-1])) if lines else Ran(fails)
