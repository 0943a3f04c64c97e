"""The public names of the package -> docs/api.md: `python scripts/api_page.py > docs/api.md`; a test compares them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from pydantic import BaseModel

import tpcompile

_HEAD = """\
# Public names

Written by `scripts/api_page.py` from the code. What is not here may change in any version. `import tpcompile` does not
import torch; each name is imported when it is used.
"""
_WITH_METHODS = ("Sentinel",)
"""Classes whose methods are listed as well."""


def page() -> str:
    """The page."""
    parts = [_HEAD]
    for name in tpcompile.__all__:
        found = getattr(tpcompile, name)
        parts += (
            _of_module(name, found) if isinstance(found, ModuleType) else _of_name("##", f"tpcompile.{name}", found)
        )
    return "\n".join(parts)


def _of_module(name: str, module: ModuleType) -> Iterator[str]:
    yield f"## tpcompile.{name}\n\n{_sentence(module)}\n"
    for public in sorted(module.__all__):
        yield from _of_name("###", f"tpcompile.{name}.{public}", getattr(module, public))


def _of_name(level: str, name: str, found: Any) -> Iterator[str]:
    yield f"{level} {name}\n"
    if not getattr(found, "__module__", "").startswith("tpcompile"):
        yield f"`{re.sub(r'[a-z_0-9.]+[.]', '', str(found))}`, a type for annotations.\n"
        return
    short = name.rpartition(".")[2]
    yield f"```\n{_signature(short, found)}\n```\n\n{_sentence(found)}\n"
    if short in _WITH_METHODS:
        yield from _methods(found)
        yield ""


def _methods(found: type) -> Iterator[str]:
    for name, method in inspect.getmembers(found, lambda one: inspect.isfunction(one) or isinstance(one, property)):
        if not name.startswith("_"):
            shown = name if isinstance(method, property) else _signature(name, method, width=1000)
            yield f"- `{shown.replace('(self, ', '(').replace('(self)', '()')}`: {_sentence(method)}"


def _signature(name: str, found: Any, *, width: int = 100) -> str:
    """The signature, a line for each parameter where it is long."""
    signature = inspect.signature(found)
    parts, has_star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind == parameter.KEYWORD_ONLY and not has_star:
            parts.append("*")
            has_star = True
        has_star |= parameter.kind == parameter.VAR_POSITIONAL
        written = _fields(found).get(parameter.name, parameter.annotation)
        parts.append(_parameter(parameter.replace(annotation=written)))
    returns = signature.return_annotation
    end = "" if returns in (inspect.Signature.empty, "None", None) else f" -> {_annotation(returns)}"
    text = f"{name}({', '.join(parts)}){end}"
    if len(text) <= width:
        return text
    lines = "".join(f"    {part},\n" for part in parts)
    return f"{name}(\n{lines}){end}"


def _fields(found: Any) -> dict[str, str]:
    """Annotations of a record as they are written: pydantic's signature has what they stand for."""
    is_record = inspect.isclass(found) and issubclass(found, BaseModel)
    return dict(found.__annotations__) if is_record else {}


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {_default(parameter.default)}"
    return text


def _default(value: Any) -> str:
    if isinstance(value, tuple) and value and all(inspect.isclass(one) for one in value):
        return f"({', '.join(one.__name__ for one in value)},)"
    return repr(value)


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.replace("typing.", "")  # which Python 3.11 leaves out of some


def _sentence(found: Any) -> str:
    """The first sentence of its docstring, else all of the first paragraph."""
    paragraph = (inspect.getdoc(found) or "").partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", paragraph)[0]


if __name__ == "__main__":
    print(page(), end="")
