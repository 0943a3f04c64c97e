"""Cause of a difference between ranks -> its name, and what is known to help."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """What made the ranks differ, as a phrase that reads well after "cause:"."""

    # The traced program.
    RANK_BRANCH = "rank-dependent branch"
    RANK_CONSTANT = "rank-dependent constant"
    GRAPH_BREAK = "graph break"
    COMPILE_DISABLED = "one rank runs the region without compiling"
    COMPILE_FAILED = "compile failed"
    NOTHING_COMPILED = "nothing was compiled"
    EXTRA_COMPILE = "code that only one rank calls was compiled there"
    RECOMPILE_LIMIT = "recompile limit reached, one rank runs eager"
    BACKEND = "backend of torch.compile differs"
    REGIONAL_COMPILE = "some ranks compile the whole, others parts of it"
    # Inputs of the compiled region.
    SHAPE = "input shape differs"
    STRIDE = "input stride differs"
    DTYPE = "input dtype differs"
    REQUIRES_GRAD = "requires_grad differs"
    FROZEN_PARAMETER = "a parameter is frozen on some ranks only"
    TIED_WEIGHTS = "weights are tied on some ranks only"
    ALIAS = "one tensor is passed twice on some ranks only"
    DISPATCH_KEY = "tensor dispatch keys or inference mode differ"
    TENSOR_SUBCLASS = "tensor subclass differs"
    AUTOMATIC_DYNAMIC = "a size is dynamic on some ranks only"
    PYTHON_VALUE = "a guarded Python value differs"
    SET_ORDER = "order of a set differs"
    DICT_ORDER = "order of a dict differs"
    # State of the process, at the first compile and in mid-run.
    AUTOCAST = "autocast differs"
    GRAD_MODE = "grad mode differs"
    DEFAULT_DTYPE = "default dtype differs"
    ALLOW_TF32 = "allow_tf32 differs"
    MATMUL_PRECISION = "matmul precision differs"
    NUM_THREADS = "number of threads differs"
    DETERMINISTIC = "deterministic algorithms differ"
    PROCESS_STATE = "state of the process differs"
    GUARD_ONLY = "guards differ, the graphs do not"
    # Lowering.
    AUTOTUNE = "autotuning chose per rank"
    PARTITIONER = "partitioner chose per rank"
    COMPILER_PASS = "compiler pass or lowering differs"
    FUSION_REGRESSED = "kernels or bytes exceed the baseline"
    # Collectives.
    REDUCE_OP = "reduce op differs"
    BROADCAST_SOURCE = "source rank of a broadcast differs"
    GROUP = "process group differs"
    ORDER_FORWARD = "order of collectives differs in the forward"
    ORDER_BACKWARD = "order of collectives differs in the backward"
    EXTRA_COLLECTIVE = "extra or missing collective"
    COLLECTIVE_SIZES = "shape, dtype or split sizes of a collective differ"
    UNWAITED = "collective is not waited for"
    UNUSED_RESULT = "result of a collective is dropped"
    STUCK_COLLECTIVE = "stuck in a collective"
    COMMUNICATION = "communication failed"
    # Around the program.
    ENVIRONMENT = "environment differs"
    INPUT_VALUES = "input values differ"
    WEIGHTS = "weights differ"
    AGREED_VALUES = "values that must be equal differ"
    KILLED = "rank was killed"
    NEVER_ARRIVED = "rank never arrived"
    RAISED = "rank raised"
    STOPPED_RESPONDING = "rank stopped responding"
    # Listed and green.
    CACHE_SPLIT = "compile cache hit on some ranks, miss on others"
    COMPILE_SKEW = "ranks compile at different times"
    COMPILE_ORDER = "ranks compiled in a different order"
    RANK_PARAMETRIC = "lowered constants address this rank's shard"
    # What the ranks executed.
    PARTED = "the ranks took different branches"
    # Calls of compiled code.
    CALL_COUNT = "one rank made more or fewer calls"
    WRONG_VARIANT = "one rank ran a different compiled variant"
    UNKNOWN = "unknown"

    @property
    def slug(self) -> str:
        """Name for `tpcompile explain`, as `rank-branch`."""
        return self.name.lower().replace("_", "-")

    @property
    def advice(self) -> str:
        """What to do about it, the first sentence first; empty where nothing is known to help."""
        return " ".join(ADVICE.get(self, ()))

    @property
    def note(self) -> str:
        """What a difference that is listed and green means; empty for any other cause."""
        return _NOTES.get(self, "")


_DECLARE = "Or declare a value that is meant to differ with `allow=`, `--allow` or gate.allow."
ADVICE: dict[Cause, tuple[str, ...]] = {
    Cause.RANK_BRANCH: (
        "Move rank-dependent work (logging, checks, saving) out of the compiled region.",
        "Or compute both branches on all ranks, and choose with `torch.where` and a buffer.",
    ),
    Cause.RANK_CONSTANT: ("Keep the number in a tensor, such as a registered buffer.", _DECLARE),
    Cause.GRAPH_BREAK: ("Remove what breaks the graph (print, logging, `.item()`), or move it out of the region.",),
    Cause.COMPILE_DISABLED: (
        "Compile this region on all ranks: no `torch.compiler.disable`, and no `if rank == 0` around `torch.compile`.",
    ),
    Cause.EXTRA_COMPILE: ("Call this function on all ranks, and compile it on all of them.",),
    Cause.RECOMPILE_LIMIT: ("Pass the value that the guard names as a tensor.",),
    Cause.BACKEND: ("Pass the same `backend` to torch.compile on all ranks.",),
    Cause.REGIONAL_COMPILE: ("Compile the same modules on all ranks.",),
    Cause.SHAPE: (
        "Pad to one shape on all ranks.",
        "Or mark the dimension dynamic on all of them (`torch._dynamo.mark_dynamic`) before the first call.",
    ),
    Cause.STRIDE: ("Call `.contiguous()` before the compiled region, on all ranks.",),
    Cause.DTYPE: ("Cast before the compiled region, on all ranks.",),
    Cause.REQUIRES_GRAD: ("Call `detach()` on the tensor before the compiled region, on all ranks.",),
    Cause.FROZEN_PARAMETER: ("Freeze the same parameters on all ranks, before the first call.",),
    Cause.TIED_WEIGHTS: ("Tie the same weights on all ranks, before the first call.",),
    Cause.ALIAS: ("Pass a clone on all ranks.",),
    Cause.DISPATCH_KEY: (
        "Create the tensor in the same mode on all ranks.",
        "Or clone it outside of `torch.inference_mode()`.",
    ),
    Cause.TENSOR_SUBCLASS: ("Call `funcol.wait_tensor` on the tensor before the compiled region, on all ranks.",),
    Cause.AUTOMATIC_DYNAMIC: ("Pass the same `dynamic=` to torch.compile on all ranks.",),
    Cause.PYTHON_VALUE: (
        "Make the value equal on all ranks.",
        "Or keep one that is meant to differ in a tensor.",
        _DECLARE,
    ),
    Cause.SET_ORDER: ("Iterate over `sorted(...)`: the order of a set depends on its history and on hash seeds.",),
    Cause.DICT_ORDER: ("Iterate over `sorted(...)`, or build the dict in one order on all ranks.",),
    Cause.AUTOCAST: ("Enter the same autocast on all ranks.",),
    Cause.GRAD_MODE: ("Enter `torch.no_grad()` or `torch.set_grad_enabled` on all ranks or on none.",),
    Cause.DEFAULT_DTYPE: ("Call torch.set_default_dtype on all ranks, before the first compile.",),
    Cause.ALLOW_TF32: ("Set torch.backends.cuda.matmul.allow_tf32 on all ranks, before the first compile.",),
    Cause.MATMUL_PRECISION: ("Call torch.set_float32_matmul_precision on all ranks, before the first compile.",),
    Cause.NUM_THREADS: ("Call torch.set_num_threads with one number on all ranks, before the first compile.",),
    Cause.DETERMINISTIC: ("Call torch.use_deterministic_algorithms on all ranks, before the first compile.",),
    Cause.GUARD_ONLY: ("Make the guarded value equal on all ranks.", _DECLARE),
    Cause.PARTITIONER: ("Set one torch._functorch.config.activation_memory_budget on all ranks.",),
    Cause.REDUCE_OP: ("Use the same reduce op on every rank.",),
    Cause.BROADCAST_SOURCE: ("Pass one `src`, a rank of the group, on all ranks.",),
    Cause.GROUP: ("Create the groups in the same order on all ranks.",),
    Cause.ORDER_FORWARD: ("Issue the collectives in one order on all ranks.",),
    Cause.ORDER_BACKWARD: ("Use the same forward on all ranks: the backward follows its order.",),
    Cause.EXTRA_COLLECTIVE: ("Issue the same collectives on every rank, none of them under a rank-local condition.",),
    Cause.COLLECTIVE_SIZES: ("Pad what is sent to one size on all ranks.",),
    Cause.UNWAITED: ("Call `wait_tensor` on the result on every rank.",),
    Cause.UNUSED_RESULT: ("Use the returned tensor: a functional collective leaves its input alone.",),
    Cause.ENVIRONMENT: ("Set it equal on all ranks before compiling.",),
    Cause.PARTED: ("Make all ranks take the same branch there: decide it from a value that they have agreed on.",),
    Cause.INPUT_VALUES: ("Broadcast the batch from one rank of the group.",),
    Cause.WEIGHTS: ("Broadcast the weights from one rank of the group.",),
    Cause.AGREED_VALUES: (
        "Compute the value on all ranks from equal inputs, with one seed.",
        "Or broadcast it from one rank of the group.",
    ),
}
"""Each sentence has a program in tests/advice that is red, and green where the sentence is followed."""

_NOTES = {
    Cause.CACHE_SPLIT: (
        "Some ranks loaded their code from a compile cache, the remaining ranks compiled it; the content is equal."
    ),
    Cause.COMPILE_ORDER: "The programs are equal, their compile ids differ.",
    Cause.RANK_PARAMETRIC: (
        "Equal programs whose lowering addresses this rank's shard (a bound, an offset, an index that is affine in the "
        "mesh coordinate); expected for DTensor."
    ),
}
