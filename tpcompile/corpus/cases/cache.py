"""Cases of compile caches and settings that are another on one rank."""

from tpcompile.corpus.case import Case
from tpcompile.evidence.records.causes import Cause

_SPLIT = "karpathy/nanochat#722: one node has cached kernels, the other compiles"
_STAGGER = "unslothai/unsloth-zoo#967: cold-cache stagger, a read-only cache folder"

CASES = (
    Case(
        name="cache_split",
        what="healthy: the cache hits on rank 0 and misses on rank 1",
        program="cache:split",
        cause=None,
        threads=(_SPLIT, _STAGGER),
    ),
    Case(
        name="cache_split_check",
        on_gpus=False,
        what="a pass compares the graphs with a collective, and the cache hits on rank 0 only",
        program="cache:split_under_check",
        cause=Cause.STUCK_COLLECTIVE,
        ranks=(1,),
        marker="# fault: compile-time check",
        threads=(
            "pytorch#193043: a compile-time sync hangs when the cache hits on some ranks",
            "xDiT#732: spmd_check hangs",
        ),
    ),
    Case(
        name="cache_unwritable",
        what="the cache folder of rank 1 is lost at step 3 and cannot be written, when all ranks recompile",
        program="cache:unwritable",
        cause=Cause.COMPILE_FAILED,
        ranks=(1,),
        marker="# blamed: the layer",
        step=3,
        threads=(_STAGGER,),
    ),
    Case(
        name="stale_artifact",
        what="rank 1 loads code from a cache that addresses the shard of rank 0",
        program="cache:stale_artifact",
        cause=Cause.INPUT_VALUES,
        ranks=(1,),
        threads=(
            "pytorch#188332, pytorch#192042: a warm cache loads the code of another rank",
            "vllm#13435, vllm#38962: a compile cache that is not keyed by rank",
        ),
    ),
    Case(
        name="recompile_limit_setting",
        what="the recompile limit of rank 1 is 2: at the third shape it runs eager",
        program="cache:limit_setting",
        cause=Cause.RECOMPILE_LIMIT,
        ranks=(1,),
        marker="# blamed: the layer",
        step=2,
        threads=("torchtitan#471: async TP silently off, cache limit reached", "allenai/OLMo-core#778: falls to eager"),
    ),
    Case(
        name="slow_compiler",
        what="healthy: Inductor takes 6 s longer on rank 1, twice",
        program="cache:slow_compiler",
        cause=None,
        threads=(_SPLIT, "pytorch#108971: compiling takes 17 to 30 minutes on some ranks"),
    ),
)
