"""Cause of a difference between ranks -> its name and what to do about it."""

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
    KILLED = "rank was killed"
    NEVER_ARRIVED = "rank never arrived"
    RAISED = "rank raised"
    STOPPED_RESPONDING = "rank stopped responding"
    # Listed and green.
    CACHE_SPLIT = "compile cache hit on some ranks, miss on others"
    COMPILE_SKEW = "ranks compile at different times"
    COMPILE_ORDER = "ranks compiled in a different order"
    RANK_PARAMETRIC = "lowered constants address this rank's shard"
    # Calls of compiled code.
    CALL_COUNT = "one rank made more or fewer calls"
    WRONG_VARIANT = "one rank ran a different compiled variant"
    UNKNOWN = "unknown"

    @property
    def advice(self) -> str:
        """What to do about it, one paragraph."""
        return ADVICE[self]


ADVICE: dict[Cause, str] = {
    Cause.RANK_BRANCH: (
        "Python control flow in the compiled region took a different branch on one rank. Move rank-dependent work "
        "(logging, checks, saving) out of the region, or make both branches the same ops on tensor data "
        "(`torch.where` with a buffer); where a set is iterated, iterate over `sorted(...)`."
    ),
    Cause.RANK_CONSTANT: (
        "Same ops, a different constant: a rank-dependent Python number was baked into the graph. `dist.get_rank()` "
        "folds with no guard, so torch never recompiles and never warns. Make it tensor data, e.g. a registered "
        "buffer. Declare a value that is meant to differ, such as the positions of a rank's tokens, with `allowed=` "
        "(of a Sentinel: `allow=`), `--allow` or gate.allow."
    ),
    Cause.GRAPH_BREAK: (
        "Remove what breaks the graph here (print, logging, `.item()`), or move it out of the region. `fullgraph=True` "
        "turns the next one into an error."
    ),
    Cause.COMPILE_DISABLED: (
        "Look for `torch.compiler.disable`, `TORCH_COMPILE_DISABLE`, `torch._dynamo.config.suppress_errors`, or an "
        "`if rank == 0` around `torch.compile` there: some ranks never compiled this region, or one instance of it."
    ),
    Cause.COMPILE_FAILED: (
        "The compiler raised on this rank; the remaining ranks wait for it, or fail with the same error. Read the "
        "error; if only one rank has it, its machine usually lacks a compiler, a cache or disk space."
    ),
    Cause.NOTHING_COMPILED: (
        "If a compile failed, read its error. Otherwise call the compiled function inside the session, and look for "
        "`torch.compiler.disable`, `TORCH_COMPILE_DISABLE`, or an object that is called in place of the one that "
        "torch.compile returned."
    ),
    Cause.EXTRA_COMPILE: (
        "Some ranks compiled code that no other rank calls. Look at what decides whether this line is "
        "reached; move rank-dependent work (logging, checks) out of the compiled region, or call it on all ranks."
    ),
    Cause.RECOMPILE_LIMIT: (
        "This rank recompiled so often that torch gave up on the function and runs it eager, with one warning on that "
        "rank only. Make the guarded value stable (mark it dynamic, pass it as a tensor), or raise "
        "torch._dynamo.config.recompile_limit on all ranks; `fullgraph=True` turns it into an error."
    ),
    Cause.SHAPE: (
        "This rank received a different shape. Pad to one shape on all ranks, or mark the dimension dynamic on all of "
        "them (`torch._dynamo.mark_dynamic`) before the first call."
    ),
    Cause.STRIDE: (
        "This rank received the same shape with a different memory layout (a transpose, a slice, a padded buffer). "
        "Call `.contiguous()` before the compiled region on all ranks."
    ),
    Cause.DTYPE: "This rank received a different dtype. Cast before the compiled region, on all ranks.",
    Cause.REQUIRES_GRAD: "Give the tensor the same requires_grad on all ranks: detach() it on all of them or on none.",
    Cause.FROZEN_PARAMETER: (
        "Freeze the same parameters on all ranks, before the first call. Where one rank has no gradient, its share of "
        "a reduced gradient is missing."
    ),
    Cause.TIED_WEIGHTS: (
        "Tie the same weights on all ranks, before the first call; tie them again after loading a checkpoint."
    ),
    Cause.ALIAS: (
        "Some ranks pass one tensor object for two arguments, the remaining ranks pass two objects. Pass a clone on "
        "all ranks, or the same object on all ranks."
    ),
    Cause.SET_ORDER: (
        "Iterate over `sorted(...)` or a list: the region iterates over a set, whose order follows the history of the "
        "process and hashes, which differ between processes for strings (PYTHONHASHSEED). Dynamo does not guard it."
    ),
    Cause.DICT_ORDER: (
        "The region iterates over a dict whose keys were inserted in a different order. Build it in one order on all "
        "ranks, or iterate over `sorted(...)`."
    ),
    Cause.AUTOCAST: "Enter the same autocast on all ranks, around the first call and every later one.",
    Cause.GRAD_MODE: (
        "Enter `torch.no_grad()` or `torch.set_grad_enabled` on all ranks or on none; warm up both modes if both are "
        "meant."
    ),
    Cause.DEFAULT_DTYPE: "Call torch.set_default_dtype once, before the first compile, and on all ranks.",
    Cause.ALLOW_TF32: (
        "Set torch.backends.cuda.matmul.allow_tf32 (or torch.set_float32_matmul_precision) once, before the first "
        "compile, and on all ranks."
    ),
    Cause.MATMUL_PRECISION: (
        "Call torch.set_float32_matmul_precision and set the reduced-precision flags of torch.backends once, before "
        "the first compile, and on all ranks."
    ),
    Cause.NUM_THREADS: ("Set torch.set_num_threads (or OMP_NUM_THREADS) equal on all ranks before the first compile."),
    Cause.DETERMINISTIC: "Call torch.use_deterministic_algorithms once, before the first compile, and on all ranks.",
    Cause.PROCESS_STATE: "Set this state of the process once, before the first compile, and on all ranks.",
    Cause.BACKEND: (
        "Some ranks lowered this graph further than others: pass the same `backend` and `mode` to torch.compile on all "
        "ranks."
    ),
    Cause.REGIONAL_COMPILE: (
        "Some ranks compile the whole model, the remaining ranks its submodules, so fusion and recompiles differ. "
        "Compile the same modules on all ranks."
    ),
    Cause.DISPATCH_KEY: (
        "The tensor has different dispatch keys on one rank: it was made under inference mode, a functorch transform "
        "or a different autocast. Create it in the same mode on all ranks; clone it outside `torch.inference_mode()` "
        "where that is not possible."
    ),
    Cause.TENSOR_SUBCLASS: (
        "One rank received a different tensor class, e.g. a DTensor, or an AsyncCollectiveTensor that was not waited "
        "for. Wait for it (`funcol.wait_tensor`) or unwrap it before the compiled region, on all ranks."
    ),
    Cause.AUTOMATIC_DYNAMIC: (
        "In a first compile, torch.compile(dynamic=...) or mark_dynamic differs between the ranks. In a later one, "
        "torch made the size dynamic on the ranks that saw it change: mark it dynamic on all ranks before the first "
        "call, pad to one size, or pass dynamic=False / dynamic=True to torch.compile."
    ),
    Cause.PYTHON_VALUE: (
        "A Python value the graph was specialised on (an attribute, a global, a closure cell, an argument) is not the "
        "same on all ranks. Make the value equal on all ranks, keep it in a tensor, or stop reading it in the compiled "
        "region. Declare a value that is meant to differ, such as the bounds of a rank's shard, with `allowed=` "
        "(of a Sentinel: `allow=`), `--allow` or gate.allow."
    ),
    Cause.GUARD_ONLY: (
        "The graphs agree today, but the ranks will recompile on different inputs. Make the guarded value equal on "
        "all ranks, or stop reading it in the compiled region; declare an intended difference in gate.allow."
    ),
    Cause.FUSION_REGRESSED: (
        "Read why the pairs are two launches, in `tpcompile fusion show` of the manifest.json of the rank. Where the "
        "change is intended, make the baseline again from that file with `tpcompile fusion baseline`."
    ),
    Cause.AUTOTUNE: (
        "Each rank timed the candidates itself, and the ranks chose different ones. Pin the choice: one shared warm "
        "cache, the same max_autotune settings, no per-rank autotuning. Inductor also times whether padding a matmul "
        "makes it faster: make sizes multiples of 8, or set torch._inductor.config.shape_padding = False."
    ),
    Cause.PARTITIONER: (
        "The joint graph was split into forward and backward at a different point, so the ranks save different "
        "activations and may recompute different ops, collectives among them. Set the same activation memory budget "
        "and the same partitioner on all ranks."
    ),
    Cause.COMPILER_PASS: (
        "The programs agree, but they were lowered differently: look for a compiler pass, a compiler setting, a cache "
        "or a custom op that depends on the rank."
    ),
    Cause.REDUCE_OP: (
        "The ranks reduce with different ops. No backend checks that: the numbers are silently wrong. Use the same "
        "reduce op on every rank."
    ),
    Cause.BROADCAST_SOURCE: (
        "The ranks pass different `src` to one broadcast: each waits for a different rank to send. Pass one `src`, a "
        "rank of the group, on all ranks."
    ),
    Cause.GROUP: (
        "The ranks issue this collective in different process groups and will wait for each other. Create the groups "
        "in the same order on all ranks and take them from one DeviceMesh."
    ),
    Cause.ORDER_FORWARD: (
        "Issue the collectives in one order on all ranks; nothing that is iterated here (a dict, a set of strings, "
        "whose order differs between processes, the order in which shards arrive) may depend on the rank. In "
        "different orders the ranks wait for each other, or, where sizes are equal, combine different tensors."
    ),
    Cause.ORDER_BACKWARD: (
        "The backward issues the same collectives in a different order on one rank. Autograd follows the forward and "
        "the compiler may reorder: use the same forward on all ranks and the same reordering passes."
    ),
    Cause.EXTRA_COLLECTIVE: (
        "Some ranks issue a collective that no other rank issues: they hang, or it is matched with a different "
        "collective. Issue the same collectives in the same order on every rank; put no collective under a rank-local "
        "condition."
    ),
    Cause.COLLECTIVE_SIZES: (
        "The ranks pass different shapes, dtypes or split sizes to one collective. Exchange the sizes first, pad, or "
        "use the variant with explicit split sizes on all ranks."
    ),
    Cause.UNWAITED: (
        "The result of a collective is read before the collective has completed. Call `wait_tensor` on it on every "
        "rank, or use a collective that waits."
    ),
    Cause.UNUSED_RESULT: (
        "A functional collective returns its result and leaves its input alone; here the result is dropped. Use the "
        "returned tensor, or delete the call on all ranks."
    ),
    Cause.STUCK_COLLECTIVE: (
        "A rank waits in a collective that the others do not reach, or reach after a different one. Look at the stack "
        "of that rank and at what decides whether the remaining ranks make the same call."
    ),
    Cause.COMMUNICATION: (
        "The exception is what this rank saw of the other ranks: one of them ended, did not arrive, or issued a "
        "different collective. Look at what those ranks did at that time."
    ),
    Cause.ENVIRONMENT: (
        "Make the environment equal on all ranks before compiling: same image, versions, variables, compiler settings."
    ),
    Cause.INPUT_VALUES: (
        "Tensors that should be equal on these ranks hold different values. Broadcast the batch, or seed the data "
        "loader and the dropout the same on all ranks of the group."
    ),
    Cause.WEIGHTS: (
        "Replicated weights are not equal any more. Broadcast them from one rank, and check which gradient is not "
        "reduced over this group."
    ),
    Cause.KILLED: (
        "The process ended by a signal. Where its line calls native code, it may have crashed there (SIGSEGV); else "
        "look for the out-of-memory killer, a preempted node or a launcher that ended the job. The remaining ranks "
        "only waited for this rank."
    ),
    Cause.NEVER_ARRIVED: (
        "This rank never reached the point where the remaining ranks wait. Look at its last log line: start-up, a "
        "barrier or an early return on this rank only."
    ),
    Cause.RAISED: "Read the exception of this rank; the remaining ranks only wait for it.",
    Cause.STOPPED_RESPONDING: (
        "The process is alive but makes no progress: a lock, a debugger, a stuck file system or a GPU fault. Take its "
        "stack (py-spy dump --pid) before it is killed."
    ),
    Cause.CACHE_SPLIT: (
        "Some ranks loaded their code from a compile cache, the remaining ranks compiled it; the content is equal. "
        "Harmless by itself, but the ranks arrive at the first collective minutes apart: warm the cache on all ranks, "
        "or raise the timeout of the process group over the first step."
    ),
    Cause.COMPILE_SKEW: (
        "The ranks reach the first collective at different times. Harmless while the skew stays below the timeout of "
        "the process group; share a warm cache, or raise the timeout over the first step."
    ),
    Cause.COMPILE_ORDER: (
        "The programs are equal, their compile ids differ; harmless, unless your code depends on the order of compiles."
    ),
    Cause.RANK_PARAMETRIC: (
        "Equal programs whose lowering addresses this rank's shard (a bound, an offset, an index that is affine in the "
        "mesh coordinate). Expected for DTensor; nothing to do."
    ),
    Cause.CALL_COUNT: (
        "All ranks compiled the same code, and one rank called it more or less often. Look at what decides whether "
        "this call is made (a batch that is skipped, an early break, a loss that is not finite) and make the same "
        "decision on all ranks: all-reduce the flag, or let every rank make the call."
    ),
    Cause.WRONG_VARIANT: (
        "All ranks have the same compiled variants, and one rank ran a different one at this call: an argument, a flag "
        "or a size is not the same on all ranks, or one rank makes more or fewer of these calls. There is no recompile "
        "and no hang, but the numbers are wrong. Make the value and the calls equal on all ranks."
    ),
    Cause.UNKNOWN: (
        "The ranks traced different programs. A value that depends on the rank reached the compiled region: keep it in "
        "a tensor (a buffer), or move it out of the region."
    ),
}
