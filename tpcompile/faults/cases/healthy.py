"""Healthy programs that must stay green."""

from tpcompile.faults.case import Case

_SKEW = "pytorch#108971: NCCL timeouts, compiling takes 17 to 30 minutes on some ranks"

CASES = (
    Case(
        name="clean",
        limit_s=300.0,
        what="healthy: equal ranks, forward and backward, two shapes",
        program="healthy:clean",
        cause=None,
        threads=(
            "meta-pytorch/tlparse#125: its warning of diverging compile ids fires on healthy ranks with a cold cache",
        ),
    ),
    Case(
        name="compile_order",
        what="healthy: rank 1 compiles two functions without collectives in opposite order",
        program="healthy:compile_order",
        cause=None,
        threads=("pytorch#175849: compile counts and orders of healthy ranks may differ",),
    ),
    Case(
        name="rank0_looks",
        what="healthy: rank 0 runs a second compiled function without a collective, from step 2 on",
        program="healthy:runs_more",
        cause=None,
        threads=("pytorch#175849: compile counts of healthy ranks may differ",),
    ),
    Case(
        name="slow_backend",
        what="healthy: rank 1 compiles 9 s longer",
        program="healthy:slow_backend",
        cause=None,
        threads=(_SKEW, "karpathy/nanochat#722: one node has cached kernels, the other compiles"),
    ),
    Case(
        name="slow_rank",
        what="healthy: rank 1 sleeps 9 s at step 2 while rank 0 waits in the collective",
        program="healthy:slow_rank",
        cause=None,
        threads=(_SKEW,),
    ),
    Case(
        name="group_names",
        what="healthy: a group made by new_group, with a name of its own",
        program="healthy:group_names",
        cause=None,
        threads=("pytorch#189330: names of groups in graphs cause cache misses",),
    ),
    Case(
        name="stages",
        what="healthy: two pipeline stages with programs of their own",
        program="healthy:stages",
        cause=None,
        mesh=(("pp", 2), ("tp", 1)),
        threads=("xDiT#732: spmd_check hangs a pipeline-parallel model",),
    ),
    Case(
        name="uneven_experts",
        what="healthy: numbers of tokens differ between ranks, as declared",
        program="healthy:uneven_experts",
        cause=None,
        threads=("torchtitan#1649, torchtitan#1640: sizes of MoE depend on the data",),
    ),
)
