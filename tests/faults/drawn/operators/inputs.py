"""Operators on what goes into the compiled region: the batch, and the weights of a rank."""

from __future__ import annotations

from tests.faults.drawn.operators.operator import Blame, Operator, Start, causes
from tests.faults.drawn.template import Insert

_ENTERS = ("call", "entered")


def _at_step(text: str) -> Insert:
    return Insert("loop", f"if job.rank == $rank and step == $step:\n    {text}  # fault")


def _from_step(text: str) -> Insert:
    return Insert("loop", f"if job.rank == $rank and step >= $step:\n    {text}  # fault")


def _on_one_rank(text: str) -> Insert:
    return Insert("built", f"if job.rank == $rank:\n    {text}  # fault")


OPERATORS = (
    Operator(
        name="input_shape",
        what="rank R receives a smaller batch at a step",
        edits=(_at_step("$half = $half[: $half.shape[0] // 2]"),),
        variants=((_from_step("$batch = $batch[:-1]"),),),
        causes=causes("shape"),
        tags=_ENTERS,
        start=Start.STEP,
    ),
    Operator(
        name="input_stride",
        what="rank R receives the same batch in a different memory layout",
        edits=(_at_step("$x = $x.transpose(0, 1).contiguous().transpose(0, 1)"),),
        variants=((_from_step("$x = torch.cat([$x, $x], dim=-1)[..., : $x.shape[-1]]"),),),
        causes=causes("stride"),
        tags=_ENTERS,
        start=Start.STEP,
    ),
    Operator(
        name="input_dtype",
        what="rank R receives a different dtype",
        edits=(_at_step("$x = $x.to(frame.other_dtype($x))"),),
        causes=causes("dtype", "compile_failed"),  # where a layer does not take the dtype, its compile fails
        tags=_ENTERS,
        start=Start.STEP,
    ),
    Operator(
        name="input_requires_grad",
        what="the batch of rank R requires grad",
        edits=(_at_step("$real.requires_grad_(True)"),),
        causes=causes("requires_grad"),
        tags=_ENTERS,
        start=Start.STEP,
    ),
    Operator(
        name="inference_tensor",
        what="the batch of rank R is made under inference mode",
        edits=(
            Insert(
                "loop",
                """
                if job.rank == $rank and step == $step:
                    with torch.inference_mode():
                        $x = $x.clone()  # fault
                """,
            ),
        ),
        causes=causes("dispatch_key"),
        tags=_ENTERS,
        start=Start.STEP,
    ),
    Operator(
        name="async_tensor",
        what="the batch of rank R is the result of a collective that was not waited for",
        edits=(
            Insert(
                "loop",
                """
                $x = funcol.all_reduce($x, "max", job.group)  # fault
                if job.rank != $rank or step != $step:  # fault
                    $x = funcol.wait_tensor($x)  # fault
                """,
            ),
        ),
        causes=causes("tensor_subclass"),
        tags=_ENTERS,
        start=Start.STEP,
    ),
    Operator(
        name="mark_dynamic",
        what="rank R marks a size of its batch dynamic",
        edits=(_from_step("torch._dynamo.mark_dynamic($half, 0)"),),
        causes=causes("automatic_dynamic", "dynamic_mark"),
        tags=_ENTERS,
        start=Start.STEP,
    ),
    Operator(
        name="mark_dynamic_at_first",
        what="rank R marks a size of its first batch dynamic",
        edits=(Insert("loop", "if job.rank == $rank:\n    torch._dynamo.maybe_mark_dynamic($half, 0)  # fault"),),
        causes=causes("automatic_dynamic", "dynamic_mark"),
        blame=Blame.DIFFER,
        tags=_ENTERS,
    ),
    Operator(
        name="aliased_input",
        what="rank R passes one tensor twice",
        edits=(_at_step("$other = $x"),),
        variants=((_from_step("$other = $x"),),),
        causes=causes("alias"),
        tags=_ENTERS,
        start=Start.STEP,
    ),
    Operator(
        name="frozen_parameter",
        what="a parameter of rank R is frozen",
        edits=(_on_one_rank("$one.weight.requires_grad_(False)"),),
        variants=((_on_one_rank("next($model.parameters()).requires_grad_(False)"),),),
        causes=causes("frozen_parameter", "requires_grad"),
        blame=Blame.DIFFER,
        tags=_ENTERS,
    ),
    Operator(
        name="tied_weights",
        what="two layers of rank R share their weight",
        edits=(_on_one_rank("$two.weight = $one.weight"),),
        causes=causes("tied_weights"),
        blame=Blame.DIFFER,
        tags=_ENTERS,
    ),
    Operator(
        name="weight_stride",
        what="a weight of rank R lies transposed in memory",
        edits=(_on_one_rank("$two.weight.data = $two.weight.data.t().contiguous().t()"),),
        causes=causes("stride"),
        blame=Blame.DIFFER,
        tags=_ENTERS,
    ),
    Operator(
        name="frozen_later",
        what="rank R freezes a parameter at a step",
        edits=(_at_step("next($model.parameters()).requires_grad_(False)"),),
        causes=causes("frozen_parameter", "requires_grad"),
        tags=_ENTERS,
        start=Start.STEP,
        # torch 2.11 does not recompile here (seen; why is not known), so nothing that is compared differs.
        unseen=(("2.11", ""),),
    ),
)
