"""What differs -> what to do about it, one paragraph per cause."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.evidence.records import Item, Layer

ONE_RANK_COMPILE = (
    "One part of the ranks compiled code the others never asked for. Look at the recompile reason and at what "
    "decides whether this line is reached; move rank-dependent work (logging, checks) out of the compiled region."
)
RANK_PARAMETRIC = (
    "Equal programs whose lowering addresses this rank's shard (a bound, an offset, an index that is affine in the "
    "mesh coordinate). Expected for DTensor; nothing to do."
)
LABEL_ONLY = "Equal programs under other labels; harmless, unless your code depends on the order of compiles."

_BY_LAYER = {
    Layer.ENVIRONMENT: "Make the environment equal on all ranks before compiling: same image, versions and variables.",
    Layer.INPUTS: (
        "This rank was fed differently. Make shape, dtype, stride and requires_grad equal on all ranks "
        "(`.contiguous()`, padding), or mark the dimension dynamic on all of them."
    ),
    Layer.GRAPH: (
        "The ranks traced different programs. A value that depends on the rank reached Python control flow or a "
        "constant: keep it in a tensor (a buffer), or move it out of the compiled region."
    ),
    Layer.GUARDS: (
        "The graphs agree today, but the ranks will recompile on different inputs. Make the guarded value equal on "
        "all ranks, or stop reading it in the compiled region; an intended difference goes to gate.allow."
    ),
    Layer.COLLECTIVES: (
        "The ranks will wait in different collectives: a hang or wrong numbers. Issue the same collectives in the "
        "same order with the same reduce op, dtype, shape and group on every rank."
    ),
    Layer.LOWERED: (
        "The programs agree, but they were lowered differently: look for a compiler pass, a partitioner choice or a "
        "custom op that depends on the rank."
    ),
    Layer.KERNELS: (
        "Same graphs, different kernels: a timing-dependent choice (autotuning), another cache, or another "
        "compiler configuration on one rank. Pin it (same cache, same config, no per-rank autotuning)."
    ),
}


def for_difference(layer: Layer, items: Sequence[Item]) -> str:
    """Advice for the first differing items of a layer."""
    texts = " ".join(item.text for item in items)
    if layer == Layer.GRAPH and "graph break" in texts:
        return "One rank breaks its graph here: remove the break (print, logging, `.item()`) or do it on all ranks."
    if layer == Layer.GRAPH and ("all_reduce" in texts or "_c10d_functional" in texts):
        return _BY_LAYER[Layer.COLLECTIVES]
    if layer == Layer.LOWERED and "constant_pad_nd" in texts:
        return (
            "Inductor times whether padding a matmul makes it faster, each rank for itself, and they decided "
            "differently. Make sizes multiples of 8, or set torch._inductor.config.shape_padding = False."
        )
    same_but_numbers = len(items) > 1 and len({_without_numbers(item.text) for item in items}) == 1
    if layer == Layer.GRAPH and same_but_numbers:
        return (
            "Same ops, another constant: a rank-dependent Python number was baked into the graph. `dist.get_rank()` "
            "folds with no guard. Make it tensor data, e.g. a registered buffer."
        )
    return _BY_LAYER[layer]


def _without_numbers(text: str) -> str:
    return "".join("#" if char.isdigit() else char for char in text)
