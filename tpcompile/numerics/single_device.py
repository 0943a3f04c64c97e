"""Module builder and inputs -> single-device results, in float64 and in the dtype under test; run -> errors.

All ranks draw the same full weights and inputs from a seed; a rank loads its slices of them, and its results are
compared with its slices of the single-device results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.collectives.strategies import Collectives, TpComm
from tpcompile.errors import ConfigError
from tpcompile.layout import Layout, Part, ShardSpec
from tpcompile.nn.state import load_full_state_dict, local_slices_of
from tpcompile.numerics import error_ratio, spread
from tpcompile.numerics.draw import Values, draw_normal, draw_weights, drawing_alike
from tpcompile.numerics.drawn import Drawn
from tpcompile.numerics.error_ratio import Errors, named_tensors

Build = Callable[[TpComm], nn.Module]
Inputs = Callable[[torch.dtype], Any]
_SEED_OF_INPUTS = 1_000_003
"""Added to the seed, so that inputs are drawn from none of weights and cotangents: equal ones would hide mistakes."""


@dataclass
class Result:
    """Tensors of one run by name: outputs `forward`, `forward.1`, ...; gradients by parameter, or `input`, ..."""

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor] = field(default_factory=dict)

    @property
    def output(self) -> Tensor:
        """The first output."""
        return self.outputs["forward"]

    @property
    def named(self) -> dict[str, Tensor]:
        """All of them: outputs by their names, gradients as `grad NAME`."""
        return self.outputs | {f"grad {name}": grad for name, grad in self.grads.items()}


class Reference:
    """One module on a single device, and what its tensor-parallel form is measured against.

    `build(comm)` makes the module, its parameters declared by `shard_specs()`; floating parameters and buffers are cast
    to `dtype`, and weights loaded from `weights` (full tensors) or drawn from the seed. `inputs(dtype)` gives the
    positional arguments as a tuple or NamedTuple, equal on all ranks: torch's generators are seeded from `seed` while
    it draws, and are as before afterwards. `agree(inputs, weights)` may compare both by name before anything runs.
    Tensors of the arguments are named `input`, then `input.FIELD` or `input.INDEX`; outputs `forward`, then
    `forward.FIELD` or `forward.INDEX`.

    A module that is not ours has its layouts in `layouts`, by pattern: `{"*.up.weight": 0, "*.down.weight": 1}`, a dim
    for equal shards or a ShardSpec; what no pattern fits is replicated.

    `differentiate` names the inputs that get a gradient, by default all floating ones. `sharded` names inputs and
    outputs of which a rank holds a part: a dim for equal parts, or a ShardSpec; others are replicated. Without `train`
    there is no backward pass. Raises ConfigError for an unknown name in either.
    """

    def __init__(
        self,
        build: Build,
        inputs: Inputs,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        seed: int = 0,
        train: bool = True,
        weights: Mapping[str, Tensor] | None = None,
        differentiate: Collection[str] | None = None,
        sharded: Mapping[str, Layout] | None = None,
        layouts: Mapping[str, Layout] | None = None,
        values: Values = "skewed",
        agree: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        self._build, self._values = build, values
        self.dtype, self.device, self.seed, self.train = dtype, torch.device(device), seed, train
        self.sharded, self.layouts = dict(sharded or {}), layouts
        self.full = self._full_weights(weights)
        # torch's default seed is random per process, so ranks would draw differently.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed + _SEED_OF_INPUTS)
            self.given = inputs(dtype)
        if agree is not None:
            agree(named_tensors(self.given, "input"), self.full)
        floating = [name for name, value in named_tensors(self.given, "input").items() if value.is_floating_point()]
        if unknown := sorted(set(differentiate or ()) - set(floating)):
            raise ConfigError(f"differentiate={unknown} is no floating input; there are {floating}")
        self.differentiated = tuple(name for name in floating if differentiate is None or name in differentiate)
        self._cotangents: dict[str, Tensor] = {}
        self._drawn = Drawn()
        with self._drawn.recorded():
            self.single = self._run(dtype)
        known = [*named_tensors(self.given, "input"), *self.single.outputs]
        if unknown := sorted(set(self.sharded) - set(known)):
            raise ConfigError(f"sharded={unknown} is no input or output; there are {known}")
        with self._drawn.exactly():
            self.exact = self._run(torch.float64)
        single = self.single.outputs | {f"grad {name}": grad for name, grad in self.single.grads.items()}
        exact = self.exact.outputs | {f"grad {name}": grad for name, grad in self.exact.grads.items()}
        self.normal = {name: error_ratio.relative(single[name], whole) for name, whole in exact.items()}
        """Single-device error of every whole tensor."""
        self._is_widened = False

    def widen(self) -> None:
        """Measure the single-device errors on numbers that are moved by one unit in the last place, too."""
        if self._is_widened:
            return
        self._is_widened = True
        for seed in range(spread.NUM_RUNS):
            module = self.single_device(self.dtype)
            spread.move_weights(module, seed=seed)
            given = spread.moved_inputs(self.given, seed=seed)
            moved = _run_alike(module, module, given, self._draw_cotangent if self.train else None, self.differentiated)
            for name, tensor in moved.named.items():
                error = error_ratio.relative(tensor, self.exact.named[name])
                self.normal[name] = max(self.normal[name], error)

    def place(self, comm: TpComm) -> nn.Module:
        """This rank's module, with its slices of the weights; all ranks of the group call it."""
        return self._placed(comm, self.dtype)

    def slices_of(self, full: Mapping[str, Tensor], module: nn.Module, comm: TpComm | None) -> dict[str, Tensor]:
        """This rank's slices of parameters, or of tensors of their shapes."""
        return local_slices_of(full, module=module, layouts=self.layouts, comm=comm)

    def inputs_for(self, comm: TpComm) -> Any:
        """This rank's arguments."""
        tensors = named_tensors(self.given, "input")
        return error_ratio.replaced(self.given, [self._part(name, full, comm) for name, full in tensors.items()])

    def run(
        self,
        program: Any,
        module: nn.Module,
        comm: TpComm,
        *,
        train: bool = True,
        on_backward: Callable[[], None] | None = None,
    ) -> Result:
        """Call `program` (the module, or its compiled form) once on this rank's arguments.

        Backward too when both this call and the reference train.
        """
        cotangents = self.cotangents(comm) if self.train and train else None
        arguments = self.inputs_for(comm)
        return _run_alike(program, module, arguments, cotangents, self.differentiated, on_backward=on_backward)

    def cotangents(self, comm: TpComm | None = None) -> dict[str, Tensor]:
        """Gradients of the outputs that the backward pass starts from, by output."""
        return {name: self._part(name, full, comm) for name, full in self._cotangents.items()}

    def errors(
        self, module: nn.Module, got: Result, comm: TpComm | None = None, *, only_forward: bool = False
    ) -> Errors:
        """`forward` and `grad NAME` -> error, single-device error and their ratio, on this rank's slices.

        Raises ConfigError when the shape of an output is not that of the rank's slice of the single-device output.
        """
        found = {}
        for name, (single, exact) in self.expected(module, comm, only_forward=only_forward).items():
            value = tensor_of(got, name)
            if value is None:
                found[name] = error_ratio.missing()
                continue
            if value.shape != exact.shape:
                raise _wrong_shape(name, value, exact)
            found[name] = error_ratio.error_of(value, single, exact, whole=self.normal[name])
        return found

    def difference(self, module: nn.Module, one: Result, two: Result) -> Errors:
        """Distance between two runs of the same computation, in units of the single-device error."""
        found = {}
        for name, (single, exact) in self.expected(module).items():
            a = tensor_of(one, name)
            b = tensor_of(two, name)
            if a is not None and b is not None:
                found[name] = error_ratio.distance(a, b, single, exact, whole=self.normal[name])
        return found

    def differs(self, module: nn.Module, got: Result, name: str, comm: TpComm | None = None) -> bool:
        """True for a tensor that is not the single-device one bit for bit; NaN always differs."""
        value, (single, _) = tensor_of(got, name), self.expected(module, comm)[name]
        return value is None or not torch.equal(value, single)

    def expected(
        self, module: nn.Module, comm: TpComm | None = None, *, only_forward: bool = False
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> this rank's slice of the single-device and of the float64 tensor."""
        found = {}
        for name, exact in self.exact.outputs.items():
            single = self.single.outputs[name]
            found[name] = self._part(name, single, comm), self._part(name, exact, comm)
        if only_forward:
            return found
        single_parts = self._grad_parts(self.single.grads, module, comm)
        for name, exact_part in self._grad_parts(self.exact.grads, module, comm).items():
            found[f"grad {name}"] = single_parts[name], exact_part
        return found

    def runs_alone(self, *, train: bool = True) -> list[tuple[nn.Module, Callable[[], dict[str, Tensor]]]]:
        """The single-device modules in the dtype under test and in float64, each with what runs it on equal numbers."""
        return [self._run_alone(dtype, train=train) for dtype in (self.dtype, torch.float64)]

    def _run_alone(self, dtype: torch.dtype, *, train: bool) -> tuple[nn.Module, Callable[[], dict[str, Tensor]]]:
        module, given = self.single_device(dtype), error_ratio.cast(self.given, dtype)
        draw = self._draw_cotangent if self.train and train else None

        def run() -> dict[str, Tensor]:
            with self._drawn.exactly() if dtype == torch.float64 else self._drawn.again():
                return _run_alike(module, module, given, draw, self.differentiated).named

        return module, run

    def single_device(self, dtype: torch.dtype) -> nn.Module:
        """The single-device module in `dtype`, on the same numbers."""
        return self._placed(Collectives(None), dtype)

    def _placed(self, comm: TpComm, dtype: torch.dtype) -> nn.Module:
        with torch.device(self.device):
            module = self._build(comm).to(dtype)
        is_meta = any(p.is_meta for p in module.parameters())
        module = module.to_empty(device=self.device) if is_meta else module.to(self.device)
        full = {name: tensor.to(dtype) for name, tensor in self.full.items()}
        load_full_state_dict(module, full, layouts=self.layouts, comm=comm)
        return module

    def _full_weights(self, weights: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        if weights is not None:
            return {name: full.detach().to(self.device, self.dtype) for name, full in weights.items()}
        with torch.device("meta"):
            module = self._build(Collectives(None))
        return draw_weights(
            module, seed=self.seed, dtype=self.dtype, device=self.device, values=self._values, layouts=self.layouts
        )

    def _run(self, dtype: torch.dtype) -> Result:
        module, given = self.single_device(dtype), self.given
        if dtype != self.dtype:
            given = error_ratio.cast(given, dtype)
        return _run_alike(module, module, given, self._draw_cotangent if self.train else None, self.differentiated)

    def _draw_cotangent(self, name: str, output: Tensor) -> Tensor:
        """Drawn for the first run, which is in the dtype under test; float64 then gets the same numbers."""
        if name not in self._cotangents:
            seed = self.seed + 2 + len(self._cotangents)
            generator = torch.Generator(self.device).manual_seed(seed)
            self._cotangents[name] = draw_normal(output.shape, generator, values=self._values).to(output.dtype)
        return self._cotangents[name].to(output.dtype)

    def _part(self, name: str, full: Tensor, comm: TpComm | None) -> Tensor:
        layout = self.sharded.get(name)
        if layout is None or comm is None or comm.size == 1:
            return full
        if isinstance(layout, int):
            dim = layout % full.dim()
            layout = ShardSpec(dim=dim, parts=(Part(full.shape[dim]),))
        return layout.take(full, rank=comm.rank, size=comm.size)

    def _grad_parts(self, grads: Mapping[str, Tensor], module: nn.Module, comm: TpComm | None) -> dict[str, Tensor]:
        of_inputs = {name: self._part(name, full, comm) for name, full in grads.items() if name in self.differentiated}
        of_weights = {name: full for name, full in grads.items() if name not in of_inputs}
        return of_inputs | self.slices_of(of_weights, module, comm)


def run_once(
    program: Any,
    module: nn.Module,
    inputs: Any,
    cotangents: Mapping[str, Tensor] | Callable[[str, Tensor], Tensor] | None,
    differentiate: Collection[str],
    *,
    on_backward: Callable[[], None] | None = None,
) -> Result:
    """Call `program` (the module, or its compiled form) once, with a backward pass when there are cotangents.

    An output that is shorter than its cotangent, as in a call with fewer tokens, starts from the first part of it.
    `on_backward` is called between the passes.
    """
    if cotangents is None:
        with torch.no_grad():
            return Result(named_tensors(program(*inputs), "forward"))
    tensors = named_tensors(inputs, "input")
    leaves = {name: tensors[name].detach().clone().requires_grad_() for name in differentiate}
    module.zero_grad(set_to_none=True)
    arguments = error_ratio.replaced(inputs, list((tensors | leaves).values()))
    outputs = named_tensors(program(*arguments), "forward")
    if on_backward is not None:
        on_backward()
    roots = {name: t for name, t in outputs.items() if t.requires_grad}
    starts = [_start(cotangents, name, root) for name, root in roots.items()]
    torch.autograd.backward(list(roots.values()), starts)
    inner = leaves | dict(module.named_parameters())
    grads = {name: leaf.grad for name, leaf in inner.items() if leaf.grad is not None}
    module.zero_grad(set_to_none=True)
    return Result({name: t.detach() for name, t in outputs.items()}, grads)


_run_alike = drawing_alike()(run_once)


def tensor_of(result: Result, name: str) -> Tensor | None:
    """The tensor an error is named after, e.g. `forward` or `grad up.weight`; None when the run has none."""
    if name.startswith("grad "):
        return result.grads.get(name.removeprefix("grad "))
    return result.outputs.get(name)


def _start(cotangents: Any, name: str, output: Tensor) -> Tensor:
    cotangent = cotangents(name, output) if callable(cotangents) else cotangents[name]
    start = cotangent[tuple(slice(0, size) for size in output.shape)]
    if start.shape != output.shape:
        raise _wrong_shape(name, output, start)
    return start


def _wrong_shape(name: str, value: Tensor, expected: Tensor) -> ConfigError:
    return ConfigError(
        f"{name} has shape {tuple(value.shape)} on this rank, its slice of the reference {tuple(expected.shape)}; "
        'say how it is laid out, e.g. sharded={"forward": 0}, or gather it'
    )
