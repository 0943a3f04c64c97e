"""Cases in which collectives of eager code go wrong, and healthy ones that look like it."""

from tpcompile.corpus.case import Case
from tpcompile.evidence.records.causes import Cause

_LOCAL = "sglang#26921, sglang#26923: TP=8 hangs after hours, a collective under local state"
_ORDER = "pytorch#75373: ranks that execute other modules hang or compute wrong results"
_SIZES = "torchtitan#1649, torchtitan#1640: some ranks hang, sizes of MoE depend on the data"

CASES = (
    Case(
        name="debug_same_size",
        what="rank 1 sums a tensor at step 2; the next collective of rank 0 takes it, and rank 1 is stuck in the last",
        program="eager:debug_same_size",
        cause=Cause.STUCK_COLLECTIVE,
        ranks=(1,),
        marker="# fault: debug sum",
        step=2,
        threads=(_LOCAL, "unslothai/unsloth-zoo#967: after a desync a collective returned garbage"),
    ),
    Case(
        name="debug_barrier",
        what="rank 1 enters a barrier at step 2",
        program="eager:debug_barrier",
        cause=Cause.STUCK_COLLECTIVE,
        ranks=(1,),
        marker="# fault: barrier",
        step=2,
        threads=(_LOCAL, "pytorch#189454: a compiled recv and a barrier in another order hang"),
    ),
    Case(
        name="local_state",
        what="rank 1 has requests left at step 2 and broadcasts its queue",
        program="eager:local_state",
        cause=Cause.STUCK_COLLECTIVE,
        ranks=(1,),
        marker="# fault: local state",
        step=2,
        threads=(_LOCAL,),
    ),
    Case(
        name="order_of_groups",
        what="eager all-reduces in two groups, in opposite order on the two ranks at step 2",
        program="eager:order_of_groups",
        cause=Cause.GROUP,
        ranks=(0, 1),
        marker="# fault: order of eager groups",
        step=2,
        threads=("torchrec#4149: 64 ranks deadlock, circular wait across two groups",),
    ),
    Case(
        name="eager_training",
        what="rank 1 trains without compiling",
        program="eager:eager_training",
        cause=Cause.COMPILE_DISABLED,
        ranks=(1,),
        marker="# fault: training without compiling",
        threads=("torchtitan#1649: one feature turned off on the ranks that hang",),
    ),
    Case(
        name="hook",
        what="rank 1 gets a gradient hook with a collective at step 2",
        program="eager:hook",
        cause=Cause.STUCK_COLLECTIVE,
        ranks=(1,),
        marker="# fault: hook",
        step=2,
        threads=(_ORDER,),
    ),
    Case(
        name="eager_split_sizes",
        on_gpus=False,
        what="rank 1 expects other split sizes than rank 0 sends, in an eager all-to-all at step 2",
        program="eager:split_sizes",
        cause=Cause.COLLECTIVE_SIZES,
        ranks=(1,),
        marker="# fault: split sizes",
        step=2,
        threads=(_SIZES,),
    ),
    Case(
        name="missing_receive",
        on_gpus=False,
        what="rank 1 does not receive what rank 0 sends at step 2",
        program="eager:missing_receive",
        cause=Cause.STUCK_COLLECTIVE,
        ranks=(1,),
        marker="# blamed: the send nobody receives",
        step=2,
        threads=("pytorch#189454, torchcomms#3095: send and recv in another order hang every night",),
    ),
    Case(
        name="lines_of_broadcast",
        what="healthy: source and receivers broadcast on lines of their own, and rank 1 is 9 s late",
        program="eager:lines_of_broadcast",
        cause=None,
        threads=("pytorch#108971: NCCL timeouts, some ranks arrive later",),
    ),
    Case(
        name="uneven_all_to_all",
        what="healthy: ranks send other numbers of tokens, as agreed, and rank 1 is 9 s late",
        program="eager:uneven_all_to_all",
        cause=None,
        threads=(_SIZES, "pytorch#189330: MoE all-to-all"),
    ),
    Case(
        name="scattered_batch",
        what="healthy: rank 0 scatters the batch, and rank 1 is 9 s late",
        program="eager:scattered_batch",
        cause=None,
        threads=("pytorch#108971: NCCL timeouts, some ranks arrive later",),
    ),
)
