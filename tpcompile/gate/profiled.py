"""The program of mode C -> its calls under the profile of the run, and how many of them were replays."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpcompile import profiles
from tpcompile.by_size import Table
from tpcompile.choices import AllReduce, Profile
from tpcompile.config import BlockConfig
from tpcompile.gate.measurements import Replays
from tpcompile.gate.reference import Result, StackReference, call_once
from tpcompile.nn.block import BlockInputs, TransformerStack
from tpcompile.numerics.draw import draw_inputs
from tpcompile.numerics.error_ratio import Errors
from tpcompile.ranks.groups import GroupLike

_ANOTHER_SEED = 71
"""Added to the seed, for inputs that no call before has had."""


class ProfiledStep:
    """One call of the stack, with its backward pass when the reference trains, under a profile."""

    def __init__(
        self,
        program: Any,
        stack: TransformerStack,
        reference: StackReference,
        *,
        profile: Profile,
        all_reduce: AllReduce | Table,
        group: GroupLike,
        timeout_s: float,
    ) -> None:
        self._program, self._stack, self._reference = program, stack, reference

        def step(*inputs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            result = call_once(reference, program, stack, BlockInputs(*inputs))
            return result.outputs, result.grads

        self._run = profiles.run(
            step, profile, group=group, is_compiled=True, clone_outputs=True, timeout_s=timeout_s,
            name=type(stack).__name__, all_reduce=all_reduce,
        )  # fmt: skip
        self._num_calls = 0

    def __call__(self, inputs: BlockInputs) -> Result:
        """Tensors of the call, which later calls leave alone."""
        self._num_calls += 1
        return Result(*self._run(*inputs))

    def compiled(self, inputs: BlockInputs) -> Result:
        """Tensors of a call without a profile."""
        return call_once(self._reference, self._program, self._stack, inputs)

    @property
    def replays(self) -> Replays:
        """How many of the calls so far were captures and replays."""
        run = self._run
        return Replays(captures=run.num_captures, replays=run.num_replays, calls=self._num_calls)

    def close(self) -> None:
        """Release CUDA graphs."""
        self._run.close()


def replay_errors(step: ProfiledStep, stack: TransformerStack, reference: StackReference) -> Errors:
    """How far a replay is from the compiled call on inputs that no call before has had; two calls of the stack.

    A graph that still read the inputs of its capture would be off by as much as the inputs differ.
    """
    config: BlockConfig = reference.config
    inputs = draw_inputs(
        config, seed=reference.seed + _ANOTHER_SEED, device=reference.device, dtype=reference.dtype,
        seq_len=config.seq_len,
    )  # fmt: skip
    apart = reference.difference(stack, step(inputs), step.compiled(inputs))
    return {f"replayed {name}": value for name, value in apart.items()}
