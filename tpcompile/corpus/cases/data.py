"""Cases in which ranks are set up, loaded or fed differently; of three ranks the odd one is known."""

from tpcompile.corpus.case import Case
from tpcompile.evidence.records.causes import Cause

_KERNELS = "flashinfer#3186, sglang#23317: TP ranks take other kernels for the same operator"
_DRIFT = "pytorch#187445, pytorch#187446: numbers drift between ranks and nothing says so"

CASES = (
    Case(
        name="auto_backend",
        what="`auto` becomes another attention backend on rank 1",
        program="data:auto_backend",
        cause=Cause.ENVIRONMENT,
        ranks=(1,),
        world_size=3,
        threads=(_KERNELS,),
    ),
    Case(
        name="compile_variable",
        what="TORCHINDUCTOR_MAX_AUTOTUNE is set on rank 1 only",
        program="data:variable",
        cause=Cause.ENVIRONMENT,
        ranks=(1,),
        world_size=3,
        env={1: {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}},
        threads=("pytorch#163369: ranks may choose other algorithms", "pytorch#160527: a bucket size set on one rank"),
    ),
    Case(
        name="dtype_policy",
        what="rank 1 loads its norm in bfloat16",
        program="data:dtype_policy",
        cause=Cause.DTYPE,
        ranks=(1,),
        world_size=3,
        threads=(_DRIFT,),
    ),
    Case(
        name="flipped_bit",
        what="one bit of a replicated norm weight is another on rank 1",
        program="data:flipped_bit",
        cause=Cause.WEIGHTS,
        ranks=(1,),
        world_size=3,
        threads=(_DRIFT,),
    ),
    Case(
        name="mutated_shard",
        what="a weight shard of rank 1 is written to at step 2, after loading",
        program="data:mutated_shard",
        cause=Cause.WEIGHTS,
        ranks=(1,),
        step=2,
        world_size=3,
        threads=(_DRIFT,),
    ),
    Case(
        name="perturbed_input",
        what="one number of the batch of rank 0 is another at step 2",
        program="data:perturbed_input",
        cause=Cause.INPUT_VALUES,
        ranks=(0,),
        step=2,
        world_size=3,
        threads=(_DRIFT,),
    ),
)
