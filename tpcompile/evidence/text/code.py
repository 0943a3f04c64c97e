"""Generated code of Inductor -> kernels, without paths, ids, device indices and group names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from tpcompile.evidence.records import Kernel
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.normalise import GroupRoles

_AOT_ID = re.compile(r"# AOT ID: \['\d+_(?P<phase>forward|backward|inference)'\]")
_DEFINITION = re.compile(r"^(?P<name>\w+) = async_compile\.(?P<kind>\w+)\(", re.MULTILINE)
_QUOTES = "'''"
_NEXT_STATEMENT = re.compile(r"^(?=\S|$)", re.MULTILINE)
_COMMENT = re.compile(r"^[^\S\n]*#(?!include|pragma|define|if|else|endif).*$", re.MULTILINE)
_TRAILING_COMMENT = re.compile(r"(?<![^\S\n])[^\S\n]++# (?:reuse|Topologically|kernel path|unbacked).*$", re.MULTILINE)
_INCLUDE = re.compile(r'#include "[^"]*"')
_GUARD_CALL = re.compile(r"((?:_DeviceGuard|set_device|get_raw_stream|_getCurrentRawStream|synchronize)\()\d+\)")
_STREAM = re.compile(r"\b(raw_)?stream\d+\b")
_PROPERTIES_INDEX = re.compile(r"(DeviceProperties\([^()]*?\bindex=)\d+")
_DEVICE_ARGUMENT = re.compile(r"(\bdevice(?:_index)?=)\d+\b")
_RANDOM = re.compile(r"(\balloc_id=)\d+\b")
"""Inductor draws one for each buffer in symmetric memory, torch 2.11 and 2.13."""
_PATH = re.compile(r"(['\"])/[^'\"\n]*/([^/'\"\n]+)\1")
_END = re.compile(r"^(?:def get_args|def benchmark_compiled_module|if __name__)", re.MULTILINE)
_ALIAS = re.compile(r"^\s*(?P<alias>\w+) = reinterpret_tensor\((?P<buffer>\w+), .*# alias$")
_REDUCED = re.compile(r"_c10d_functional\.all_reduce_(?:\.default)?\((?P<buffer>\w+)\b")
_FREED = re.compile(r"^\s*(?:\w+ = \w+; )?del (?P<name>\w+)$")  # reusing a tensor's memory does not read it
_NAME = re.compile(r"\b\w+\b")
_SYMBOL = re.compile(r"^\s*(?P<symbol>s\d+) = (?P<argument>\w+)$")
_ARGUMENTS = re.compile(r"^(?P<indent>[^\S\n]*)(?P<names>\w.*?),? = args$", re.MULTILINE)
_NUMBERED = re.compile(r"^(?:primals_\d+|arg\d+_\d+)$")
_RETURN = re.compile(r"^(?P<indent>\s*)return \((?P<names>.*)\)$")
_START = "async_compile = AsyncCompile()"


def parse_kernels(code: str, *, roles: GroupRoles) -> tuple[str, tuple[Kernel, ...]]:
    """Return the phase of the code (`forward` or `backward`) and its kernels.

    The last record, kind `call`, is the wrapper that launches them: order, extern calls, buffers, collectives.
    """
    phases = _AOT_ID.findall(code)
    phase = "backward" if phases[:1] == ["backward"] else "forward"
    _, _, started = code.partition(_START)
    body, *_ = _END.split(started or code, maxsplit=1)
    definitions, rest = _definitions(body)
    kernels = [
        Kernel(phase=phase, name=head["name"], kind=head["kind"], code=_clean(source, roles))
        for head, source in definitions
    ]
    wrapper = without_unused_symbols(_clean(rest, roles))
    kernels.append(Kernel(phase=phase, name="call", kind="call", code=wrapper))
    return phase, tuple(kernels)


def _definitions(body: str) -> tuple[list[tuple[re.Match[str], str]], str]:
    """The head of every kernel's definition, each with its source; and the code without them.

    A definition holds one text in triple quotes, and ends before the next line that is not indented.
    """
    found = []
    rest = []
    read = 0
    for head in _DEFINITION.finditer(body):
        if head.start() < read:
            continue  # a line of the source before
        opened = body.find(_QUOTES, head.end())
        inside = opened + len(_QUOTES)
        closed = body.find(_QUOTES, inside)
        behind = closed + len(_QUOTES)
        end = _NEXT_STATEMENT.search(body, behind)
        if opened < 0 or closed < 0 or end is None:
            break  # no later one is whole either
        found.append((head, body[head.end() : end.start()]))
        rest.append(body[read : head.start()])
        read = end.start()
    return found, "".join([*rest, body[read:]])


def overwritten_reads(wrapper: str) -> tuple[int, ...]:
    """Numbers, in issue order, of the in-place all-reduces that clobber a buffer which the `call` wrapper reads later.

    Inductor computes the operands of a `cat` in its buffer and reduces that buffer in place although an operand is
    read later: repro/inductor_all_reduce_of_cat.py, torch 2.11 to 2.13.
    """
    owner: dict[str, str] = {}  # alias -> buffer it lies in
    reduced: dict[str, int] = {}  # alias whose buffer was reduced -> number of the all-reduce
    found = set()
    number = 0
    for line in wrapper.splitlines():
        if alias := _ALIAS.match(line):
            owner[alias["alias"]] = alias["buffer"]
        elif call := _REDUCED.search(line):
            reduced |= {alias: number for alias, buffer in owner.items() if buffer == call["buffer"]}
            number += 1
        elif freed := _FREED.match(line):
            owner.pop(freed["name"], None)
            reduced.pop(freed["name"], None)
        else:
            found |= {reduced[name] for name in _NAME.findall(line) if name in reduced}
    return tuple(sorted(found))


def without_unused_symbols(wrapper: str) -> str:
    """The `call` wrapper without symbols that nothing uses, see `tpcompile.evidence.text.fx.unused_symbols`.

    The remaining inputs (`primals_3`, `arg2_1`) are renumbered by their position, and the None that it returns as a
    symbol's gradient is left out.
    """
    lines = wrapper.splitlines()
    names = {"None"}
    definitions = set()
    for unused in _unused_symbols(lines):
        names.update(unused.groups())
        definitions.add(unused.string)
    kept = "\n".join(_without_names(line, names) for line in lines if line not in definitions)
    inputs = [name for found in _ARGUMENTS.finditer(kept) for name in found["names"].split(", ")]
    numbers = {name: f"input_{at}" for at, name in enumerate(inputs) if _NUMBERED.match(name)}
    return _NAME.sub(lambda name: numbers.get(name[0], name[0]), kept)


def _unused_symbols(lines: Sequence[str]) -> list[re.Match[str]]:
    """Definitions of symbols that no later line uses, except a return."""
    body = [line for line in lines if not _RETURN.match(line)]
    times = Counter(_NAME.findall("\n".join(body)))
    named = filter(None, map(_SYMBOL.match, body))
    return [found for found in named if times[found["symbol"]] == 1]


def _without_names(line: str, left_out: set[str]) -> str:
    """The line that unpacks the inputs, or that returns, without those names; any other line as it is."""
    form = "{} = args"
    found = _ARGUMENTS.match(line)
    if found is None:
        form = "return ({})"
        found = _RETURN.match(line)
    if found is None:
        return line
    listed = found["names"].rstrip(" ").removesuffix(",")
    names = [name for name in listed.split(", ") if name not in left_out]
    return found["indent"] + form.format(", ".join(names))


def _clean(code: str, roles: GroupRoles) -> str:
    code = _TRAILING_COMMENT.sub("", _COMMENT.sub("", code))
    code = _INCLUDE.sub('#include "PATH"', code)
    code = _PROPERTIES_INDEX.sub(r"\1INDEX", _GUARD_CALL.sub(r"\1INDEX)", code))
    code = _DEVICE_ARGUMENT.sub(r"\1INDEX", _RANDOM.sub(r"\1RANDOM", _STREAM.sub("stream", code)))
    code = roles.in_calls(_PATH.sub(r"\1\2\1", normalise.generic(code)))
    lines = [line.rstrip() for line in code.splitlines() if line.strip()]
    return "\n".join(lines)
