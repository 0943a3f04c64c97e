"""Cases in which a process dies, stops, raises, leaves or never comes."""

from tpcompile.corpus.case import Case
from tpcompile.evidence.records.causes import Cause

_LAYER = "# blamed: the layer"
_GARBAGE = "unslothai/unsloth-zoo#967: one rank fails, watchdog abort on the others in all of 4 scenarios"
_SKEW = "pytorch#108971: NCCL timeouts, some ranks arrive 17 to 30 minutes later"
_UNLOGGED = "pytorch#140395: a rank hangs, and what it did is not logged"

CASES = (
    Case(
        name="killed",
        what="rank 0 is killed at step 3",
        program="process:killed",
        cause=Cause.KILLED,
        ranks=(0,),
        step=3,
        threads=(_GARBAGE,),
    ),
    Case(
        name="killed_compiling",
        what="rank 1 is killed while it compiles for the first time",
        program="process:killed_compiling",
        cause=Cause.KILLED,
        ranks=(1,),
        threads=("pytorch#130935: jobs time out while some ranks compile",),
    ),
    Case(
        name="stopped",
        what="rank 0 is stopped (SIGSTOP) at step 3 and never continued",
        program="process:stopped",
        cause=Cause.STOPPED_RESPONDING,
        ranks=(0,),
        step=3,
        threads=(_UNLOGGED,),
    ),
    Case(
        name="stopped_compiling",
        what="rank 1 is stopped (SIGSTOP) while it compiles for the first time",
        program="process:stopped_compiling",
        cause=Cause.STOPPED_RESPONDING,
        ranks=(1,),
        threads=(_UNLOGGED,),
    ),
    Case(
        name="raised",
        what="rank 1 raises between two calls, at step 3",
        program="process:raised",
        cause=Cause.RAISED,
        ranks=(1,),
        marker="# fault: raised",
        step=3,
        threads=(_GARBAGE,),
    ),
    Case(
        name="raised_connection",
        what="rank 1 raises ConnectionResetError at step 3, from the storage of its data",
        program="process:raised_connection",
        cause=Cause.RAISED,
        ranks=(1,),
        marker="# fault: storage",
        step=3,
        threads=(_GARBAGE,),
    ),
    Case(
        name="disk_full_compiling",
        what="all ranks recompile at step 4, and the backend of rank 1 raises: its disk is full",
        program="process:disk_full_compiling",
        cause=Cause.COMPILE_FAILED,
        ranks=(1,),
        marker=_LAYER,
        step=4,
        threads=(_GARBAGE, "triton#2688, pytorch#134384: FileNotFoundError while compiling on random ranks"),
    ),
    Case(
        name="left_early",
        what="rank 1 leaves its loop at step 3, the others go on",
        program="process:left_early",
        cause=Cause.CALL_COUNT,
        ranks=(1,),
        marker="# blamed: the call that one rank does not make",
        step=3,
        threads=("pytorch#75373: ranks that execute other modules hang or compute wrong results",),
    ),
    Case(
        name="out_of_memory",
        what="an allocation of rank 1 fails at step 3",
        program="process:out_of_memory",
        cause=Cause.RAISED,
        ranks=(1,),
        marker="# fault: out of memory",
        step=3,
        threads=(_GARBAGE,),
    ),
    Case(
        name="never_arrives",
        what="rank 1 waits for its first data for ever; skew_limit_s is 6 s",
        program="process:never_arrives",
        cause=Cause.NEVER_ARRIVED,
        ranks=(1,),
        marker="# fault: data never comes",
        options={"skew_limit_s": 6.0},
        threads=(_SKEW, _UNLOGGED),
    ),
    Case(
        name="never_comes_back",
        what="rank 1 waits for its data for ever at step 3; skew_limit_s is 6 s",
        program="process:never_arrives",
        cause=Cause.NEVER_ARRIVED,
        ranks=(1,),
        marker="# fault: data never comes",
        step=3,
        options={"skew_limit_s": 6.0},
        threads=(_SKEW, _UNLOGGED),
    ),
    Case(
        name="slow_first_batch",
        what="healthy: rank 1 makes its first call 9 s later",
        program="process:slow_first_batch",
        cause=None,
        threads=(_SKEW, "karpathy/nanochat#722: watchdog kill at start, one node is ready long before the other"),
    ),
)
