"""Every collective on two ranks: eager equals every backend, one graph equal on all ranks, make_fx, torch.export."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from tests.collectives.forms import COLUMNS, FORMS, x_shape
from tests.graphs import GraphCapture
from tpcompile.collectives import api as tp
from tpcompile.collectives import asynchronous as later
from tpcompile.collectives.observer import Call, active, observing
from tpcompile.collectives.strategies import Collectives, DisabledCollectives, InPlaceCollectives
from tpcompile.errors import TpCompileError
from tpcompile.testing import run_on_ranks

pytestmark = pytest.mark.long

# Tracing dim 1 of every form would double the cost: compiled forms have it once for each kind of move. Left out too
# is what another form traces to but for the name of its reduction; eager values have every form (test_gradients.py).
MOVED = ["all_gather R dim 1", "scatter R dim 1", "reduce_scatter dim 1", "all_to_all dim 1"]
TRACED = [
    name for name in FORMS if not name.endswith("dim 1") and " min " not in name and "start avg" not in name
] + MOVED
SHARDS = {
    "even": [name for name in TRACED if FORMS[name].even],
    "uneven": [name for name in TRACED if not FORMS[name].even],
}
"""Forms that are traced together."""
# Around the collective of uneven shards are slices and copies, which Inductor compiles for moves of even ones as well.
BACKENDS = {"even": ("eager", "aot", "inductor"), "uneven": ("eager", "aot")}
WEIGHT = torch.linspace(-1, 1, COLUMNS * COLUMNS, dtype=torch.float64).view(COLUMNS, COLUMNS)


def _input(name: str) -> Tensor:
    rank, form = dist.get_rank(), FORMS[name]
    generator = torch.Generator().manual_seed(rank if form.takes == "V" else 9)
    return torch.randn(x_shape(form, rank, 2), dtype=torch.float64, generator=generator).requires_grad_()


def _all_forms(xs: list[Tensor], group: Any, names: list[str]) -> list[Tensor]:
    """Of products, which need no kernel that Inductor has to compile."""
    return [FORMS[name].call(x @ WEIGHT, group) for name, x in zip(names, xs, strict=True)]


class _Backends(GraphCapture):
    """A torch.compile backend: what Dynamo traced, compiled in several ways; `chosen` says which one runs."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        self.chosen = ""

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        ways = {"eager": lambda graph, _: graph, "aot": super().__call__, "inductor": lookup_backend("inductor")}
        compiled = {name: ways[name](deepcopy(graph), inputs) for name in self.names}
        return lambda *args: compiled[self.chosen](*args)


def _compiled(names: list[str], ways: Sequence[str]) -> dict[str, Any]:
    """Forms in one graph, traced once: values and gradients in eager and by every backend, texts and collectives."""
    torch._dynamo.reset()
    backends = _Backends(ways)
    compiled = torch.compile(_all_forms, backend=backends, fullgraph=True)
    values = {"": _value_and_gradient(_all_forms, names)}
    for backends.chosen in ways:
        values[backends.chosen] = _value_and_gradient(compiled, names)
    ops = {phase: [row[1] for row in backends.collectives if row[0] == phase] for phase in ("forward", "backward")}
    return {"values": values, "texts": backends.texts, "ops": ops}


def _value_and_gradient(fn: Callable[..., list[Tensor]], names: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    xs = [_input(name) for name in names]
    ys = fn(xs, dist.group.WORLD, names)
    sum((y * y).sum() for y in ys).backward()
    return {name: (y.detach(), x.grad) for name, y, x in zip(names, ys, xs, strict=True)}


def _other_tracers(names: list[str]) -> dict[str, str]:
    group = dist.group.WORLD

    class Module(torch.nn.Module):
        def forward(self, xs: list[Tensor]) -> list[Tensor]:
            return call(xs)

    def call(xs: list[Tensor]) -> list[Tensor]:
        return [FORMS[name].call(x, group) for name, x in zip(names, xs, strict=True)]

    def step(xs: list[Tensor]) -> Any:
        return torch.autograd.grad(sum(y.sum() for y in call([x * 1 for x in xs])), xs)

    xs = [_input(name) for name in names]
    plain = [x.detach() for x in xs]
    texts = {mode: make_fx(call, tracing_mode=mode)(plain).code for mode in ("real", "symbolic")}
    texts["gradient"] = make_fx(step, tracing_mode="fake")(xs).code
    exported = torch.export.export(Module(), (plain,), strict=False)
    texts["export"] = str(exported.graph)
    assert all(torch.equal(a, b) for a, b in zip(exported.module()(plain), call(plain), strict=True))
    return texts


def _ops(text: str) -> list[str]:
    """Functional collectives in order."""
    return [op for op in re.findall(r"_c10d_functional\.(\w+)\.default", text) if op != "wait_tensor"]


def _checkpointed() -> list[Tensor]:
    """Forward is issued again in the backward, on all ranks alike: gradients without that, in eager, and compiled."""

    def region(x: Tensor) -> Tensor:
        y = tp.all_reduce(tp.copy_to_tp(x, group=group).sin(), group=group, dst="R")
        z = tp.reduce_scatter_single(y.cos(), dim=0, group=group)
        pending = later.all_gather_start(z.sin(), dim=0, group=group)
        return tp.broadcast(pending.wait().sin(), src=0, group=group)

    def step(x: Tensor, keep: Callable[..., Tensor]) -> Tensor:
        return keep(region, x, use_reentrant=False) if keep is checkpoint else region(x)

    group, gradients = dist.group.WORLD, []
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for fn, keep in ((step, None), (step, checkpoint), (compiled, checkpoint)):
        x = _input("all_reduce sum I")
        fn(x, keep).sum().backward()
        gradients.append(x.grad)
    return gradients


def _differentiated_twice(name: str) -> str:
    x = _input(name)
    y = FORMS[name].call(x, dist.group.WORLD)
    (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    try:
        first.square().sum().backward()
    except TpCompileError as error:
        return str(error)
    return "no error"


def _first_order_only(name: str) -> bool:
    """create_graph=True alone changes nothing."""
    gradients = []
    for create_graph in (False, True):
        x = _input(name)
        y = FORMS[name].call(x, dist.group.WORLD)
        gradients += torch.autograd.grad(y.sin().sum(), x, create_graph=create_graph)
    return torch.equal(gradients[0], gradients[1])


def _overlap() -> dict[str, list[str]]:
    """AOT ops in order, of a pair with work in between."""
    torch._dynamo.reset()
    capture, group = GraphCapture(), dist.group.WORLD

    def step(x: Tensor, w: Tensor) -> Tensor:
        pending = later.all_reduce_start(x, group=group, dst="R")
        side = (w @ w).sin()
        return pending.wait() + side

    x, w = _input("all_reduce sum I"), _input("all_reduce sum I")
    torch.compile(step, backend=capture, fullgraph=True)(x, w).sum().backward()
    return {phase: _calls(text) for phase, text in capture.texts if phase != "dynamo"}


def _calls(text: str) -> list[str]:
    parts = [line.split("torch.ops.")[1].split("(")[0] for line in text.splitlines() if "= torch.ops." in line]
    return [part.split(".")[1] for part in parts]


def _spellings() -> list[list[tuple[str, str]]]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("tp")
    return [_spelled(one) for one in (group, group.group_name, mesh["tp"], (mesh, "tp"), (mesh, 1))]


def _spelled(group: Any) -> list[tuple[str, str]]:
    torch._dynamo.reset()
    capture = GraphCapture()

    def step(x: Tensor) -> Tensor:
        return tp.all_reduce(x, group=group, dst="R").sin()

    x = _input("all_reduce sum I")
    y = torch.compile(step, backend=capture, fullgraph=True)(x)
    y.sum().backward()
    assert torch.equal(y, step(x))
    return [
        (phase, "\n".join(line for line in text.splitlines() if "# File" not in line)) for phase, text in capture.texts
    ]


class _Watcher:
    def __init__(self) -> None:
        self.calls: list[Call] = []

    def observe(self, call: Call, x: Tensor, run: Callable[[], Tensor]) -> Tensor:
        self.calls.append(call)
        return run()


def _observed() -> dict[str, Any]:
    group, x = dist.group.WORLD, _input("all_reduce sum I")
    eager, traced = _Watcher(), _Watcher()
    with observing(eager):
        for form in FORMS.values():
            form.call(_input_for(form), group)
    with observing(traced):
        torch._dynamo.reset()
        capture = GraphCapture()
        torch.compile(lambda x: tp.all_reduce(x, group=group), backend=capture, fullgraph=True)(x)
        make_fx(lambda x: tp.all_reduce(x, group=group))(x.detach())
    watched = _Watcher()
    with observing(watched):
        tp.all_reduce(x.detach(), group=group)
        tp.all_reduce(x.detach(), group=None)
    return {
        "names": [call.name for call in eager.calls],
        "traced": len(traced.calls),
        "hot": len(watched.calls),
        "texts": "".join(text for _, text in capture.texts),
        "left": active.observer is None,
    }


def _input_for(form: Any) -> Tensor:
    return _input(next(name for name, known in FORMS.items() if known is form))


def _guards() -> str:
    """Guards of a frame that calls a wrapper, before any observer is active."""
    torch._dynamo.reset()
    group, texts = dist.group.WORLD, []
    fn = torch.compile(
        lambda x: tp.all_reduce(x, group=group),
        backend="eager",
        fullgraph=True,
        options={"guard_filter_fn": lambda guards: [bool(texts.append(g.name)) or True for g in guards]},
    )
    fn(torch.ones(4))
    return " ".join(texts)


def _modes() -> dict[str, Any]:
    """Values of gather, reduce-scatter and maximum in the modes A, B and C, eager and compiled where it traces."""
    found: dict[str, Any] = {}
    for mode in (Collectives, InPlaceCollectives, DisabledCollectives):
        comm = mode(dist.group.WORLD)

        def step(x: Tensor, comm: Any = comm) -> tuple[Tensor, ...]:
            return (
                comm.all_gather(x * 1, dim=-1),
                comm.reduce_scatter(x * 1, dim=1),
                comm.all_max(x * 1),
                comm.scatter(x * 1, dim=0),
            )

        x = _input("all_reduce sum I").detach()
        torch._dynamo.reset()
        breaks = torch._dynamo.utils.counters["graph_break"]
        breaks.clear()
        compiled = torch.compile(step, backend="aot_eager", fullgraph=mode is not DisabledCollectives)(x)
        found[mode.__name__] = (*step(x), *compiled)
        found[f"{mode.__name__} breaks"] = breaks.total()
    return found


def _worker() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {
        "compiled": {shards: _compiled(names, BACKENDS[shards]) for shards, names in SHARDS.items()},
        "tracers": {shards: _other_tracers(names) for shards, names in SHARDS.items()},
        "checkpoint": _checkpointed(),
        "twice": {name: _differentiated_twice(name) for name in FORMS},
        "once": {name: _first_order_only(name) for name in FORMS},
        "overlap": _overlap(),
        "spellings": _spellings(),
        "guards": _guards(),
        "observed": _observed(),
        "modes": _modes(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_worker, timeout_s=280)


@pytest.mark.parametrize(("shards", "backend"), [(shards, name) for shards in SHARDS for name in BACKENDS[shards]])
def test_values_and_gradients_equal_eager(ranks: list[dict[str, Any]], shards: str, backend: str) -> None:
    for r in ranks:
        values = r["compiled"][shards]["values"]
        eager, wrong = values[""], []
        for name, pair in values[backend].items():
            close = [torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(pair, eager[name], strict=True)]
            wrong += [] if all(close) else [name]
        assert wrong == []


@pytest.mark.parametrize("shards", SHARDS)
def test_all_are_one_graph_with_the_stated_ops(ranks: list[dict[str, Any]], shards: str) -> None:
    forms = [FORMS[name] for name in SHARDS[shards]]
    for r in ranks:
        found = r["compiled"][shards]
        assert [kind for kind, _ in found["texts"]] == ["dynamo", "forward", "backward"]
        assert found["ops"]["forward"] == [op for form in forms for op in form.forward]
        assert found["ops"]["backward"] == [op for form in reversed(forms) for op in form.backward]


def test_graphs_of_even_shards_are_equal_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["compiled"]["even"]["texts"] == ranks[1]["compiled"]["even"]["texts"]
    assert ranks[0]["tracers"]["even"] == ranks[1]["tracers"]["even"]


def test_graphs_of_uneven_shards_differ_and_the_comparison_sees_it(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["compiled"]["uneven"]["texts"] != ranks[1]["compiled"]["uneven"]["texts"]


@pytest.mark.parametrize("shards", SHARDS)
def test_make_fx_and_export_hold_the_functional_ops(ranks: list[dict[str, Any]], shards: str) -> None:
    forms = [FORMS[name] for name in SHARDS[shards]]
    forward = [op for form in forms for op in form.forward]
    backward = [op for form in reversed(forms) for op in form.backward]
    for tracer, text in ranks[0]["tracers"][shards].items():
        assert _ops(text) == forward + (backward if tracer == "gradient" else []), tracer
        assert "c10d.allreduce_" not in text and "AsyncCollectiveTensor" not in text


def test_activation_checkpointing_keeps_the_gradient_eager_and_compiled(ranks: list[dict[str, Any]]) -> None:
    for r in ranks:
        kept, *recomputed = r["checkpoint"]
        assert [torch.equal(gradient, kept) for gradient in recomputed] == [True, True]


@pytest.mark.parametrize("name", FORMS)
def test_differentiating_twice_is_refused(ranks: list[dict[str, Any]], name: str) -> None:
    assert all("differentiated twice" in r["twice"][name] for r in ranks)


def test_recording_the_first_gradient_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    assert all(all(r["once"].values()) for r in ranks)


def test_work_between_start_and_wait_runs_between_the_two_ops(ranks: list[dict[str, Any]]) -> None:
    forward = ranks[0]["overlap"]["forward"]
    assert forward.index("all_reduce") < forward.index("mm") < forward.index("wait_tensor")
    backward = ranks[0]["overlap"]["backward"]
    assert {"all_reduce", "wait_tensor"} <= set(backward)


def test_all_spellings_of_a_group_give_one_graph(ranks: list[dict[str, Any]]) -> None:
    for r in ranks:
        assert all(texts == r["spellings"][0] for texts in r["spellings"])
    assert ranks[0]["spellings"] == ranks[1]["spellings"]


def test_observer_sees_every_eager_call_and_no_traced_one(ranks: list[dict[str, Any]]) -> None:
    public = {
        "all_to_all": "all_to_all_single",
        "all_gather": "all_gather_single",
        "scatter": "scatter_single",
        "reduce_scatter": "reduce_scatter_single",
    }
    words = [name.split()[0].removesuffix("_start") for name in FORMS]
    for r in ranks:
        seen = r["observed"]
        assert seen["names"] == [public.get(word, word) for word in words]
        assert (seen["traced"], seen["hot"], seen["left"]) == (0, 1, True)


def test_graphs_and_guards_do_not_mention_the_observer(ranks: list[dict[str, Any]]) -> None:
    assert "observer" not in ranks[0]["guards"] + ranks[0]["observed"]["texts"]
    assert "group" in ranks[0]["guards"], "the search must find what is guarded"


def test_modes_gather_and_scatter_alike(ranks: list[dict[str, Any]]) -> None:
    for r in ranks:
        expected = r["modes"]["Collectives"]
        for mode in ("InPlaceCollectives", "DisabledCollectives"):
            assert all(torch.equal(a, b) for a, b in zip(r["modes"][mode], expected, strict=True))
        assert [r["modes"][f"{m}Collectives breaks"] for m in ("", "InPlace")] == [0, 0]
        assert r["modes"]["DisabledCollectives breaks"] > 0
