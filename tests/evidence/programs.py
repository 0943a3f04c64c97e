"""Random small programs -> the trace events torch would write for them, with the incidental parts under control.

A `Program` is what counts. `Noise` is what must not count: temporary names, ids, addresses, paths, comments, the
order of keyword arguments and of guards, compile-id labels, group names, device indices.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from tpcompile.evidence.compiles.trace import TraceEvent, compile_records
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.records import RankDigest, RankRecord


@dataclass(frozen=True)
class Op:
    """One op: its arguments are references to earlier values (int) or constants (str, as written)."""

    target: str
    args: tuple[int | str, ...]
    kwargs: tuple[tuple[str, str], ...] = ()
    dtype: str = "f32"
    shape: tuple[int, ...] = (4, 8)
    stride: tuple[int, ...] = (8, 1)
    group: str = ""
    """Role of the process group, for a collective."""


@dataclass(frozen=True)
class GuardLine:
    """One guard: its type, its source and what it says; `{id}` stands for an object id."""

    type: str
    source: str
    says: str


@dataclass(frozen=True)
class Program:
    """One compiled frame."""

    inputs: int
    ops: tuple[Op, ...]
    guards: tuple[GuardLine, ...]


@dataclass(frozen=True)
class Noise:
    """Seed of everything that must not count."""

    seed: int
    groups: tuple[tuple[str, str], ...] = (("tp", "0"), ("dp", "1"))
    """Role -> name of the process group in this process."""


TARGETS = ["torch.relu", "torch.sin", "torch._C._nn.gelu", "torch.ops.aten.mul.Tensor", "torch.ops.aten.add.Tensor"]
REDUCE_OPS = ["sum", "max", "avg"]
CONSTANTS = ["0.5", "2", "-1", "True", "'none'", "[1, 0]", "12345678901"]
SAYS = ["{source} == 1", "{source} == 0.75", "{source} == 'relu'", "len({source}) == 2", "{source} == 98765432101"]


@st.composite
def ops(draw: st.DrawFn, index: int, inputs: int) -> Op:
    """An op that may refer to anything before it."""
    reference = st.integers(0, inputs + index - 1)
    shape = draw(st.sampled_from([(4, 8), (2, 16)]))
    common = {"shape": shape, "stride": (shape[1], 1), "dtype": draw(st.sampled_from(["f32", "bf16", "u8"]))}
    if draw(st.booleans()):
        args = (draw(reference), f"'{draw(st.sampled_from(REDUCE_OPS))}'")
        group = draw(st.sampled_from(["tp", "dp"]))
        return Op("torch.ops._c10d_functional.all_reduce", args, group=group, **common)
    args = (draw(reference), *draw(st.lists(st.sampled_from(CONSTANTS), max_size=2)))
    keys = draw(st.lists(st.sampled_from(["alpha", "dim", "approximate"]), unique=True, max_size=3))
    kwargs = tuple((key, draw(st.sampled_from(CONSTANTS))) for key in keys)
    return Op(draw(st.sampled_from(TARGETS)), args, kwargs, **common)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A program of a few inputs, ops and guards."""
    inputs = draw(st.integers(1, 3))
    count = draw(st.integers(1, 6))
    body = tuple(draw(ops(index, inputs)) for index in range(count))
    names = draw(st.lists(st.sampled_from(["L['x']", "L['self'].scale", "G['act']", "G['cfg'].k"]), unique=True))
    says = st.sampled_from(SAYS)
    guards = [GuardLine("EQUALS_MATCH", name, draw(says).format(source=name)) for name in names]
    guards.append(GuardLine("ID_MATCH", "G['fn']", "___check_obj_id(G['fn'], {id}), type=<function fn at 0x{hex}>"))
    return Program(inputs, body, tuple(guards))


noises = st.builds(
    Noise,
    seed=st.integers(0, 10**6),
    groups=st.sampled_from([(("tp", "0"), ("dp", "1")), (("tp", "4"), ("dp", "3")), (("tp", "12"), ("dp", "2"))]),
)


def graph_text(program: Program, noise: Noise) -> str:
    """The program as `print_readable` writes it."""
    rng = random.Random(noise.seed)
    names = [f"L_x{i}_" for i in range(program.inputs)]
    device = f"cuda:{rng.randrange(8)}"
    signature = ", ".join(f'{name}: "f32[4, 8][8, 1]{device}"' for name in names)
    lines = ["class GraphModule(torch.nn.Module):", f"    def forward(self, {signature}):"]
    for number, op in enumerate(program.ops):
        name = f"{rng.choice(['mul', 'tmp', 'y', 'view'])}_{rng.randrange(1000)}_{number}"
        if rng.random() < 0.5:
            lines.append(
                f"        # File: /home/u{rng.randrange(99)}/model.py:{rng.randrange(99)} in forward, code: y = f(x)"
            )
        lines.append(f'        {name}: "{value(op, device)}" = {call(op, names, noise, rng)};  tmp_free = None')
        names.append(name)
    lines.append(f"        return ({names[-1]},)")
    return "\n".join(lines) + "\n"


def value(op: Op, device: str) -> str:
    """Annotation of an op's result."""
    return f"{op.dtype}[{', '.join(map(str, op.shape))}][{', '.join(map(str, op.stride))}]{device}"


def call(op: Op, names: list[str], noise: Noise, rng: random.Random) -> str:
    """Right-hand side of an op, keyword arguments in any order."""
    args = [names[arg] if isinstance(arg, int) else arg for arg in op.args]
    if op.group:
        args.append(f"'{dict(noise.groups)[op.group]}'")
    kwargs = [f"{key} = {constant}" for key, constant in op.kwargs]
    rng.shuffle(kwargs)
    return f"{op.target}({', '.join(args + kwargs)})"


def guard_text(program: Program, noise: Noise) -> str:
    """The guards as torch writes the tree, in any order, with this process's ids."""
    rng = random.Random(noise.seed + 1)
    guards = list(program.guards)
    rng.shuffle(guards)
    lines = ["", "TREE_GUARD_MANAGER:", "+- RootGuardManager"]
    for guard in guards:
        says = guard.says.format(id=rng.randrange(10**13, 10**15), hex=f"{rng.randrange(16**6, 16**11):x}")
        lines.append(
            f"| +- GuardManager: source={guard.source}, accessed_by=DictGetItemGuardAccessor('x'), type=<class 'int'>"
        )
        lines.append(f"| | +- {guard.type}: {says}  # y = f(x)  # app/model.py:{rng.randrange(99)} in forward")
    lines.append(f"Guard latency = {rng.random() * 100:.2f} us")
    return "\n".join(lines)


def events(program: Program, noise: Noise) -> list[TraceEvent]:
    """The events of the compile of this program."""
    rng = random.Random(noise.seed + 2)
    compile_id = f"{rng.randrange(9)}/0"

    def event(name: str, metadata: object, payload: str = "") -> TraceEvent:
        return TraceEvent(name, {name: metadata}, payload, compile_id, 0, "first")

    inputs = [
        item
        for number in range(program.inputs)
        for item in (
            event("describe_tensor", {
                "id": number, "describer_id": noise.seed, "size": [4, 8], "stride": [8, 1], "dtype": "torch.float32",
                "device": f"device(type='cuda', index={rng.randrange(8)})",
                "view_func": f"<f at 0x{rng.randrange(16**8):x}>",
            }),
            event("describe_source", {"id": number, "describer_id": noise.seed, "source": f"L['x{number}']"}),
        )
    ]  # fmt: skip
    return [
        *inputs,
        event("dynamo_output_graph", {"sizes": {}}, graph_text(program, noise)),
        event("dynamo_cpp_guards_str", {}, guard_text(program, noise)),
    ]


def digest(program: Program, noise: Noise, *, rank: int = 0) -> RankDigest:
    """What the rank that compiled this program would send."""
    return digest_rank(record(program, noise, rank=rank))


def record(program: Program, noise: Noise, *, rank: int = 0) -> RankRecord:
    """What the rank that compiled this program knows."""
    roles = {name: role for role, name in noise.groups}
    return RankRecord(
        rank=rank, world_size=2, coordinate=rank, compiles=compile_records(events(program, noise), roles=roles)
    )


def content(program: Program, noise: Noise) -> list[str]:
    """All layer hashes of the compile, without labels."""
    return [layer.sha256 for compile_ in digest(program, noise).compiles for layer in compile_.layers]


def mutations(program: Program) -> st.SearchStrategy[Program]:
    """Every kind of change that counts, applied once somewhere."""
    positions = range(len(program.ops))
    changed = [change for i in positions for change in op_changes(program, i)]
    changed += [guard_change(program, i) for i, g in enumerate(program.guards) if g.type == "EQUALS_MATCH"]
    changed.append(replace(program, ops=(*program.ops, Op("torch.cos", (0,)))))
    changed.append(replace(program, guards=(*program.guards, GuardLine("TYPE_MATCH", "G['new']", "type is int"))))
    changed += [swap(program, i) for i in positions[:-1] if swap(program, i) != program]
    return st.sampled_from(changed)


def op_changes(program: Program, index: int) -> list[Program]:
    """One op with a different target, argument, edge, shape, dtype, stride, reduce op or group."""
    op = program.ops[index]
    changed = [
        replace(op, dtype="u16"),
        replace(op, shape=(1, 32)),
        replace(op, stride=(1, op.shape[0])),
        replace(op, kwargs=(*op.kwargs, ("extra", "7"))),
        replace(op, target=f"{op.target}_other"),
    ]
    if program.inputs + index > 1:
        changed.append(replace(op, args=((op.args[0] + 1) % (program.inputs + index), *op.args[1:])))
    if op.group:
        changed.append(replace(op, group="dp" if op.group == "tp" else "tp"))
        changed.append(replace(op, args=(op.args[0], "'min'")))
    else:
        changed.append(replace(op, args=(*op.args, "31337")))
    return [replace(program, ops=(*program.ops[:index], new, *program.ops[index + 1 :])) for new in changed]


def guard_change(program: Program, index: int) -> Program:
    """One guard that says something else."""
    guard = program.guards[index]
    new = replace(guard, says=guard.says + " and True")
    return replace(program, guards=(*program.guards[:index], new, *program.guards[index + 1 :]))


def swap(program: Program, index: int) -> Program:
    """Two neighbouring ops in the other order, where neither uses the other."""
    first, second = program.ops[index], program.ops[index + 1]
    here = program.inputs + index
    used_later = any(arg in (here, here + 1) for op in program.ops[index + 1 :] for arg in op.args)
    if used_later:
        return program
    return replace(program, ops=(*program.ops[:index], second, first, *program.ops[index + 2 :]))
