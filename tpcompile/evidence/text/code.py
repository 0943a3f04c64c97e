"""Generated code of Inductor -> kernels, without paths, ids, device indices and group names."""

from __future__ import annotations

import re
from collections import Counter

from tpcompile.evidence.records import Kernel
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.normalise import GroupRoles

_AOT_ID = re.compile(r"# AOT ID: \['\d+_(forward|backward|inference)'\]")
_DEFINITION = re.compile(
    r"^(?P<name>\w+) = async_compile\.(?P<kind>\w+)\((?P<body>.*?'''.*?'''.*?)^(?=\S|$)", re.MULTILINE | re.DOTALL
)
_COMMENT = re.compile(r"^\s*#(?!include|pragma|define|if|else|endif).*$", re.MULTILINE)
_TRAILING_COMMENT = re.compile(r"\s+# (?:reuse|Topologically|kernel path|unbacked).*$", re.MULTILINE)
_INCLUDE = re.compile(r'#include "[^"]*"')
_GUARD_CALL = re.compile(r"((?:_DeviceGuard|set_device|get_raw_stream|_getCurrentRawStream|synchronize)\()\d+\)")
_STREAM = re.compile(r"\bstream\d+\b")
_PROPERTIES_INDEX = re.compile(r"(DeviceProperties\([^)]*?\bindex=)\d+")
_DEVICE_ARGUMENT = re.compile(r"(\bdevice(?:_index)?=)\d+\b")
_PATH = re.compile(r"(['\"])/[^'\"\n]*/([^/'\"\n]+)\1")
_END = re.compile(r"^(?:def get_args|def benchmark_compiled_module|if __name__)", re.MULTILINE)
_ALIAS = re.compile(r"^\s*(?P<alias>\w+) = reinterpret_tensor\((?P<buffer>\w+), .*# alias$")
_REDUCED = re.compile(r"_c10d_functional\.all_reduce_(?:\.default)?\((?P<buffer>\w+)\b")
_FREED = re.compile(r"^\s*(?:\w+ = \w+; )?del (?P<name>\w+)$")  # reusing the memory of a tensor reads nothing of it
_NAME = re.compile(r"\b\w+\b")
_SYMBOL = re.compile(r"^\s*(?P<symbol>s\d+) = (?P<argument>\w+)$")
_ARGUMENTS = re.compile(r"^(?P<indent>\s*)(?P<names>\w.*?),? = args$", re.MULTILINE)
_NUMBERED = re.compile(r"^(?:primals_\d+|arg\d+_\d+)$")
_RETURN = re.compile(r"^(?P<indent>\s*)return \((?P<names>.*?),? *\)$")
_START = "async_compile = AsyncCompile()"


def parse_kernels(code: str, *, roles: GroupRoles) -> tuple[str, tuple[Kernel, ...]]:
    """Return the phase of the code (`forward` or `backward`) and its kernels.

    The last record, kind `call`, is the wrapper that launches them: order, extern calls, buffers, collectives.
    """
    match = _AOT_ID.search(code)
    phase = "backward" if match and match[1] == "backward" else "forward"
    body = code.partition(_START)[2] or code
    if end := _END.search(body):
        body = body[: end.start()]
    kernels = [
        Kernel(phase=phase, name=m["name"], kind=m["kind"], code=_clean(m["body"], roles))
        for m in _DEFINITION.finditer(body)
    ]
    wrapper = without_unused_symbols(_clean(_DEFINITION.sub("", body), roles))
    kernels.append(Kernel(phase=phase, name="call", kind="call", code=wrapper))
    return phase, tuple(kernels)


def overwritten_reads(wrapper: str) -> tuple[int, ...]:
    """Numbers, in order of issue, of the in-place all-reduces that overwrite what the `call` wrapper reads afterwards.

    Inductor computes the parts of a concatenation into its buffer and reduces that in place although a part is still
    needed: repro/inductor_all_reduce_of_cat.py, torch 2.11 to 2.13.
    """
    owner: dict[str, str] = {}  # alias -> buffer it lies in
    reduced: dict[str, int] = {}  # alias whose buffer was reduced -> number of the all-reduce
    found, number = set(), 0
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

    Its other inputs are numbered anew, and what it returns for a symbol in place of a gradient, None, is left out.
    """
    lines = wrapper.splitlines()
    times = Counter(_NAME.findall("\n".join(line for line in lines if not _RETURN.match(line))))
    sets = [found for found in map(_SYMBOL.match, lines) if found is not None]
    unused = [found for found in sets if times[found["symbol"]] == 1]
    left_out = {"None"}.union(*(found.groups() for found in unused))
    dropped = {found.string for found in unused}
    kept = "\n".join(_filtered(line, left_out) for line in lines if line not in dropped)
    inputs = [name for found in _ARGUMENTS.finditer(kept) for name in found["names"].split(", ")]
    numbers = {name: f"input_{at}" for at, name in enumerate(inputs) if _NUMBERED.match(name)}
    return _NAME.sub(lambda name: numbers.get(name[0], name[0]), kept)


def _filtered(line: str, left_out: set[str]) -> str:
    """The line of the inputs, or of what is returned, without those."""
    for pattern, start, end in ((_ARGUMENTS, "", " = args"), (_RETURN, "return (", ")")):
        if found := pattern.match(line):
            names = [name for name in found["names"].split(", ") if name not in left_out]
            return f"{found['indent']}{start}{', '.join(names)}{end}"
    return line


def _clean(code: str, roles: GroupRoles) -> str:
    code = _TRAILING_COMMENT.sub("", _COMMENT.sub("", code))
    code = _INCLUDE.sub('#include "PATH"', code)
    code = _PROPERTIES_INDEX.sub(r"\1INDEX", _GUARD_CALL.sub(r"\1INDEX)", code))
    code = _DEVICE_ARGUMENT.sub(r"\1INDEX", _STREAM.sub("stream", code))
    code = roles.in_calls(_PATH.sub(r"\1\2\1", normalise.generic(code)))
    return "\n".join(line.rstrip() for line in code.splitlines() if line.strip())
