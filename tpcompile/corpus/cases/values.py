"""Cases in which one rank has another Python value."""

from tpcompile.corpus.case import Case
from tpcompile.evidence.records.causes import Cause

_ATTRIBUTE = "# blamed: attribute of the block"
_SCALE = "optimum-habana#1174: wrong numbers from a compiled all-reduce"
_FOLDS = "pytorch#109029: get_rank() folds with no guard"

CASES = (
    Case(
        name="attribute",
        what="an attribute of the module changes on rank 1 at step 2",
        program="values:attribute",
        cause=Cause.PYTHON_VALUE,
        ranks=(1,),
        marker=_ATTRIBUTE,
        step=2,
        threads=("pytorch#155558: compiler collectives deadlock when one rank recompiles",),
    ),
    Case(
        name="attribute_constant",
        what="an attribute of the module has another value on rank 1 from the beginning",
        program="values:attribute_constant",
        cause=Cause.PYTHON_VALUE,
        ranks=(1,),
        marker=_ATTRIBUTE,
        threads=(_SCALE, "Megatron-LM#1754: loss of tensor parallelism off by 50%"),
    ),
    Case(
        name="global",
        what="a global changes on rank 1 at step 2",
        program="values:module_global",
        cause=Cause.PYTHON_VALUE,
        ranks=(1,),
        marker="# fault: global",
        step=2,
        threads=("pytorch#155558: compiler collectives deadlock when one rank recompiles",),
    ),
    Case(
        name="closure",
        what="a closure cell is rebound on rank 1 at step 2",
        program="values:closure",
        cause=Cause.PYTHON_VALUE,
        ranks=(1,),
        marker="# fault: closure",
        step=2,
        threads=("pytorch#155558: compiler collectives deadlock when one rank recompiles",),
    ),
    Case(
        name="branch",
        what="`if rank == 1` over a captured number, from the beginning",
        program="values:guarded_branch",
        cause=Cause.RANK_BRANCH,
        ranks=(1,),
        marker="# fault: guarded branch",
        threads=(_FOLDS,),
    ),
    Case(
        name="getrank_branch",
        what="`if dist.get_rank() == 1` in the region, from the beginning; no guard holds it",
        program="values:getrank_branch",
        cause=Cause.RANK_BRANCH,
        ranks=(1,),
        marker="# fault: get_rank branch",
        threads=(_FOLDS, "pytorch#185418: get_rank as a SymInt"),
    ),
    Case(
        name="getrank_constant",
        what="a factor is computed from `dist.get_rank()`, from the beginning; no guard holds it",
        program="values:getrank_constant",
        cause=Cause.RANK_CONSTANT,
        ranks=(1,),
        marker="# fault: get_rank constant",
        threads=(_FOLDS, "pytorch#188332: bucketed all-gather bakes the rank's offset into cached code"),
    ),
    Case(
        name="edges",
        what="rank 1 swaps the operands of a subtraction",
        program="values:edges",
        cause=Cause.PYTHON_VALUE,
        ranks=(1,),
        marker="# fault: edges",
        threads=("pytorch#177960: spmd_check hashes ops and shapes, not edges",),
    ),
    Case(
        name="guard_only",
        what="a number that is only checked is 200 on rank 1 and 100 on rank 0; equal graphs",
        program="values:guard_only",
        cause=Cause.GUARD_ONLY,
        ranks=(1,),
        marker="# fault: guard only",
        threads=("pytorch#114015: asks for a guard diff",),
    ),
    Case(
        name="module_order",
        what="rank 1 runs two layers in opposite order",
        program="values:module_order",
        cause=Cause.RANK_BRANCH,
        ranks=(1,),
        marker="# fault: module order",
        threads=("pytorch#75373: asks to validate the execution order of ranks",),
    ),
    Case(
        name="recompile_limit",
        what="rank 1 exceeds the recompile limit at step 3 and runs eager from there on",
        program="values:recompile_limit",
        cause=Cause.RECOMPILE_LIMIT,
        ranks=(1,),
        marker="# fault: recompile limit",
        step=3,
        threads=(
            "torchtitan#471: async TP silently off, cache limit reached",
            "allenai/OLMo-core#778: a helper specialises per block, then falls to eager",
        ),
    ),
)
