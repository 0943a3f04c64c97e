"""Inductor's reasons for not fusing two nodes -> what they mean, and what would change it.

Reasons as torch 2.11.0 and 2.13.0 log them (`TORCH_LOGS=fusion`); `tests/fusion/test_reasons.py` compares the list with
the installed torch.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import cache

from tpcompile.evidence.records.base import Frozen


class Boundary(StrEnum):
    """What keeps two launches apart."""

    COLLECTIVE = "collective"
    EXTERN = "library call"
    CUSTOM = "custom op"
    TRITON = "Triton kernel of yours"
    TEMPLATE = "matmul template"
    ORDER = "order"
    SHAPE = "shape"
    STAGES = "stages of a reduction"
    INDEXING = "indexing"
    DEVICE = "device"
    MUTATION = "in place"
    SIZE = "size limit"
    MEMORY = "peak memory"
    TIMING = "timing"
    BACKEND = "backend, silent"
    CHOICES = "choices, silent"
    NOT_TRIED = "not tried"
    UNKNOWN = "unknown reason"


class Reason(Frozen):
    """Why two nodes were not fused."""

    boundary: Boundary
    text: str
    """In plain words."""
    remedy: str = ""
    """The setting or rewrite that makes one launch of them, of which tests/advice has a program; empty for none."""
    saves_nothing: bool = False
    """True where neither reads what the other has at hand, or next to nothing: one kernel would move as much."""

    @property
    def says(self) -> str:
        """On one line: `size limit: the kernel would have too many ops; try: config.max_fusion_size`."""
        remedy = f"; try: {self.remedy}" if self.remedy else ""
        return f"{self.boundary}: {self.text}{remedy}"


DIFFERENT_ORDER = Reason(
    boundary=Boundary.INDEXING,
    text="the second reads the buffer in a different order, or more of it, than the first writes",
)
NOTHING_SHARED = Reason(
    boundary=Boundary.INDEXING,
    text="they read the same buffer, but no element of it in the same order: one pass would save no read",
    saves_nothing=True,
)
TWO_ORDERS = Reason(boundary=Boundary.INDEXING, text="they read the same buffer in different orders")

_KNOWN: dict[str, Reason] = {
    "intermediate nodes between node1 & node2": Reason(
        boundary=Boundary.ORDER,
        text="a different launch must run between them, which reads what the first writes and feeds the second",
    ),
    "will create cycle": Reason(
        boundary=Boundary.ORDER, text="one kernel would have to run before and after a different one"
    ),
    "node1 must go before node2": Reason(boundary=Boundary.ORDER, text="the second makes an input of the first"),
    "memory deps did not match": DIFFERENT_ORDER,
    "no shared data": NOTHING_SHARED,
    "no shared data due to indexing mismatch": Reason(
        boundary=Boundary.INDEXING, text="they use the same buffer with different indices"
    ),
    "score_fusion_memory_threshold": Reason(
        boundary=Boundary.SIZE,
        text="they share too few bytes",
        remedy="config.score_fusion_memory_threshold = 0 (10 bytes by default)",
        saves_nothing=True,
    ),
    "exceeds max fusion": Reason(
        boundary=Boundary.SIZE, text="the kernel would hold too many nodes", remedy="config.max_fusion_size (64)"
    ),
    "fusion_prevent_too_many_reads_and_writes": Reason(
        boundary=Boundary.SIZE,
        text="the kernel would read and write too many buffers",
    ),
    "Fusion will increase peak memory": Reason(
        boundary=Boundary.MEMORY,
        text="a buffer would have to live longer, and peak memory would grow",
    ),
    "Nodes are too far away. Fusing them may increase peak memory.": Reason(
        boundary=Boundary.MEMORY,
        text="they are far from each other in the program: fused, a buffer would live longer",
    ),
    "device mismatch (%s vs %s)": Reason(boundary=Boundary.DEVICE, text="they run on different devices"),
    "fusion for buffer explicit disabled": Reason(
        boundary=Boundary.MUTATION, text="a pass of Inductor forbids fusion of this buffer (no_fuse_buffer_names)"
    ),
    "grouped node must not be fused with other nodes": Reason(
        boundary=Boundary.ORDER, text="one belongs to a group of nodes that a pass keeps together"
    ),
    "numel/rnumel mismatch (reduce) (%s, %s), (%s, %s)": Reason(
        boundary=Boundary.SHAPE, text="two reductions over different shapes"
    ),
    "numel/rnumel mismatch (non-reduce) (%s, %s), (%s, %s)": Reason(
        boundary=Boundary.SHAPE, text="they have different numbers of elements"
    ),
    "numel/rnumel mismatch prologue mismatch (%s, %s), (%s, %s)": Reason(
        boundary=Boundary.SHAPE, text="the template's operand has a different number of elements"
    ),
    "nodes numel incompatibility": Reason(boundary=Boundary.SHAPE, text="their numbers of elements do not fit"),
    "nodes numel/rnumel incompatibility": Reason(
        boundary=Boundary.SHAPE, text="a reduction and a pointwise node of a different shape"
    ),
    "tiling mismatch (%s, %s, %s)": Reason(
        boundary=Boundary.SHAPE,
        text="fused, the kernel would need a different tiling than each alone",
    ),
    "invalid tiling for reduction": Reason(
        boundary=Boundary.SHAPE,
        text="the reduction's tiling does not fit the other node",
    ),
    "invalid loop order and tiling for native matmul": Reason(
        boundary=Boundary.SHAPE, text="the loop order of the native matmul does not fit"
    ),
    "Split scan cannot fuse with reductions": Reason(
        boundary=Boundary.SHAPE, text="a long scan is several kernels, which take no reduction"
    ),
    "prologue fusion turned off": Reason(boundary=Boundary.TEMPLATE, text="operands are not computed in the template"),
    "prologue fusion only supported for pointwise nodes": Reason(
        boundary=Boundary.TEMPLATE, text="a reduction cannot be computed in a template's operand"
    ),
    "prologue fusion only supported for TritonTemplates": Reason(
        boundary=Boundary.TEMPLATE, text="this template takes no computed operand"
    ),
    "prologue fusion not implemented for kernel for these inputs": Reason(
        boundary=Boundary.TEMPLATE, text="the template takes no computed operand at this place"
    ),
    "template has no allowed prologue inputs": Reason(
        boundary=Boundary.TEMPLATE, text="the template takes no computed operand"
    ),
    "prologue fusion will not increase amount of bytes read in kernel": Reason(
        boundary=Boundary.TEMPLATE,
        text="the template would read more than 1.1 times the bytes: several operands instead of one",
    ),
    "prologue fusion will not increase attempt to fuse in padding bc it increases unaligned reads": Reason(
        boundary=Boundary.TEMPLATE, text="padding in the template would read unaligned"
    ),
    "prologue fusion that must be upcast to fp32 not profitable for low precision templates": Reason(
        boundary=Boundary.TEMPLATE, text="the operand is computed in float32, the template in a lower precision"
    ),
    "template prologue can only fuse functional pointwise nodes": Reason(
        boundary=Boundary.MUTATION, text="the operand is written in place"
    ),
    "template prologue can only fuse nodes with a single use": Reason(
        boundary=Boundary.TEMPLATE, text="the operand is used elsewhere too"
    ),
    "template prologue can only fuse nodes with a single use into template": Reason(
        boundary=Boundary.TEMPLATE, text="the operand is used elsewhere too"
    ),
    "template epilogue not satisfied": Reason(
        boundary=Boundary.TEMPLATE,
        text="a reduction, or an op in place, cannot follow in the template, or config.epilogue_fusion is off",
    ),
    "multi-output template epilogue requires ComputedBuffer": Reason(
        boundary=Boundary.TEMPLATE, text="the template has several outputs, and takes pointwise nodes only"
    ),
    "node1 is nop": Reason(boundary=Boundary.UNKNOWN, text="the first does nothing"),
    "node1 is extern or nop": Reason(boundary=Boundary.EXTERN, text="the first is a library call"),
    "node2 is extern or nop": Reason(boundary=Boundary.EXTERN, text="the second is a library call"),
    "node1 is extern but not a triton kernel": Reason(boundary=Boundary.EXTERN, text="the first is a library call"),
    "node1 is extern but node2 is not SchedulerNode": Reason(
        boundary=Boundary.TRITON, text="a Triton kernel of yours takes one pointwise node only"
    ),
    "node1 is extern but node2.node is not SchedulerNode": Reason(
        boundary=Boundary.TRITON, text="a Triton kernel of yours takes one pointwise node only"
    ),
    "node1 is extern but node2.node.data is not Pointwise": Reason(
        boundary=Boundary.TRITON, text="a Triton kernel of yours takes one pointwise node only"
    ),
    "node1's triton kernel doesn't support epilogue fusion": Reason(
        boundary=Boundary.TRITON,
        text="your Triton kernel cannot take what follows",
    ),
    "epilogue reads from buffers other than the mutated output": Reason(
        boundary=Boundary.TRITON, text="what follows your Triton kernel reads a second buffer"
    ),
    "node1 and node2 uses different buf layouts": Reason(
        boundary=Boundary.TRITON, text="what follows your Triton kernel has a different layout"
    ),
    "foreach do not have same length": Reason(
        boundary=Boundary.SHAPE, text="two foreach ops over lists of different lengths"
    ),
    "candidate producer is not dep of any foreach consumer": Reason(
        boundary=Boundary.ORDER, text="no element of the foreach op reads it"
    ),
    "candidate consumer has no dep in any foreach producer": Reason(
        boundary=Boundary.ORDER, text="it reads no element of the foreach op"
    ),
    "candidate producer is a reduction, foreach ops cannot be fused with reductions currently": Reason(
        boundary=Boundary.SHAPE, text="foreach ops take no reduction"
    ),
    "candidate consumer is a reduction, foreach ops cannot be fused with reductions currently": Reason(
        boundary=Boundary.SHAPE, text="foreach ops take no reduction"
    ),
    "register spilling of the first kernel": Reason(boundary=Boundary.TIMING, text="the first kernel spills registers"),
    "register spilling of the second kernel": Reason(
        boundary=Boundary.TIMING, text="the second kernel spills registers"
    ),
    "register spilling of the fused kernel": Reason(
        boundary=Boundary.TIMING, text="fused, the kernel would spill registers"
    ),
}


def reason_of(logged: str) -> Reason:
    """What a logged reason means; the text itself where it is not known."""
    for pattern, reason in _patterns():
        if pattern.fullmatch(logged):
            return reason
    return Reason(boundary=Boundary.UNKNOWN, text=f"Inductor says: {logged}")


@cache
def _patterns() -> list[tuple[re.Pattern[str], Reason]]:
    return [(re.compile(".*".join(map(re.escape, text.split("%s")))), reason) for text, reason in _KNOWN.items()]
