"""The programs by name, and what each needs; torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program below programs/, and in which ways it can be run."""

    name: str
    world_sizes: tuple[int, ...] = (2, 2, 3)
    """Drawn from; the ranks of `tp` are what the other axes leave."""
    dp: int = 1
    pp: int = 1
    backends: tuple[str, ...] = ("aot_eager", "aot_eager", "inductor", "eager")
    num_steps: int = 6
    needs: str = ""
    """Package that may be missing."""
    layers_in: str = ""
    """File that calls its layers, where that is not the program."""
    without: tuple[str, ...] = ()
    """Operators that do not act in it."""

    def domain(self, rank: int, *, world_size: int) -> tuple[int, ...]:
        """Ranks of the group `tp` of a rank; tp is the innermost axis."""
        size = world_size // (self.dp * self.pp)
        first = rank // size * size
        return tuple(range(first, first + size))


_TRANSFORMERS = "transformers"
_NO_INDUCTOR = ("aot_eager", "aot_eager", "eager")
"""Where a cold compile of C++ takes longer than all the rest."""

# train_loop: a break in a checkpointed layer makes torch give up the whole region, and nothing is compiled.
# dtensor_plan: its two equal weights have one dimension.
# serve: each size has variants of its own, and every tensor is made in inference mode.
# decode_loop: dynamic=False; an id of one token has one stride only.
# fsdp_tp: FSDP keeps parameters of its own, which take neither hooks nor a late requires_grad.
_EVERY = (
    Program(name="hand_mlp"),
    Program(name="hand_function"),
    Program(name="dtensor_plan", without=("weight_stride",)),
    Program(name="train_loop", backends=_NO_INDUCTOR, without=("same_break",)),
    Program(name="sequence_parallel", backends=_NO_INDUCTOR),
    Program(name="moe"),
    Program(name="regional"),
    Program(name="serve", without=("wrong_variant", "inference_tensor")),
    Program(name="fsdp_tp", world_sizes=(4,), dp=2, backends=_NO_INDUCTOR, without=("frozen_later", "gradient_hook")),
    Program(name="decode_loop", without=("dynamic_differs", "input_stride", "recompile_limit")),
    Program(name="micro_batches", backends=_NO_INDUCTOR),
    Program(name="our_block", backends=_NO_INDUCTOR),
    Program(name="our_block_sp", layers_in="block.py", backends=_NO_INDUCTOR),
    Program(name="pipeline", world_sizes=(4,), pp=2, backends=_NO_INDUCTOR),
    Program(name="vocabulary", world_sizes=(4,), dp=2, backends=("aot_eager",)),
    Program(name="hf_llama", layers_in="modeling_llama.py", needs=_TRANSFORMERS, backends=("aot_eager",)),
    Program(name="hf_qwen3", layers_in="modeling_qwen3.py", needs=_TRANSFORMERS, backends=("aot_eager",)),
    Program(name="hf_mixtral", layers_in="modeling_mixtral.py", needs=_TRANSFORMERS, backends=("aot_eager",)),
)
PROGRAMS: dict[str, Program] = {program.name: program for program in _EVERY}
