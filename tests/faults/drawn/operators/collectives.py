"""Operators that change a collective in the compiled region."""

from __future__ import annotations

from tests.faults.drawn.operators.operator import Blame, Operator, causes
from tests.faults.drawn.template import Insert

OPERATORS = (
    Operator(
        name="reduce_op",
        what="rank R reduces with max, the other ranks with sum",
        edits=(
            Insert(
                "region",
                """
                how = "max" if dist.get_rank() == $rank else "sum"  # fault
                $x = $x + 0.1 * funcol.all_reduce($x.detach(), how, $group)  # fault
                """,
            ),
        ),
        causes=causes("reduce_op"),
        blame=Blame.DIFFER,
    ),
    Operator(
        name="dropped_collective",
        what="rank R leaves out an all-reduce",
        edits=(
            Insert(
                "region",
                """
                if dist.get_rank() != $rank:  # fault
                    $x = $x + 0.1 * funcol.all_reduce($x.detach(), "sum", $group)  # fault
                """,
            ),
        ),
        causes=causes("extra_collective"),
        blame=Blame.DIFFER,
    ),
    Operator(
        name="extra_collective",
        what="rank R issues an additional collective",
        edits=(
            Insert(
                "region",
                """
                if dist.get_rank() == $rank:  # fault
                    $x = $x + 0.1 * funcol.all_reduce($x.detach(), "avg", $group)  # fault
                """,
            ),
        ),
        variants=(
            (
                Insert(
                    "region",
                    """
                    if int(os.environ["RANK"]) == $rank:  # fault
                        parts = funcol.all_gather_tensor($x.detach(), 0, $group)  # fault
                        $x = $x + parts.mean()
                    """,
                ),
            ),
        ),
        causes=causes("extra_collective"),
        blame=Blame.DIFFER,
    ),
    Operator(
        name="reordered_collectives",
        what="rank R gathers before it reduces, the other ranks reduce before they gather",
        edits=(
            Insert(
                "region",
                """
                if dist.get_rank() == $rank:  # fault
                    parts = funcol.all_gather_tensor($x.detach(), 0, $group)  # fault
                    total = funcol.all_reduce($x.detach(), "sum", $group)  # fault
                else:
                    total = funcol.all_reduce($x.detach(), "sum", $group)  # fault
                    parts = funcol.all_gather_tensor($x.detach(), 0, $group)  # fault
                $x = $x + 0.1 * total + parts.mean()
                """,
            ),
        ),
        causes=causes("order_forward"),
        blame=Blame.DIFFER,
    ),
    Operator(
        name="collective_size",
        what="rank R reduces half of the tensor",
        edits=(
            Insert(
                "region",
                """
                part = $x.detach().flatten()
                if dist.get_rank() == $rank:  # fault
                    part = part[: part.numel() // 2]  # fault
                $x = $x + funcol.all_reduce(part, "sum", $group).mean()  # fault
                """,
            ),
        ),
        causes=causes("collective_sizes"),
        blame=Blame.DIFFER,
    ),
    Operator(
        name="collective_dtype",
        what="rank R reduces in float64",
        edits=(
            Insert(
                "region",
                """
                dtype = torch.float64 if dist.get_rank() == $rank else torch.float32  # fault
                $x = $x + funcol.all_reduce($x.detach().to(dtype), "sum", $group).to($x.dtype)  # fault
                """,
            ),
        ),
        causes=causes("collective_sizes"),
        blame=Blame.DIFFER,
    ),
    Operator(
        name="wrong_group",
        what="rank R reduces over a different group with the same members",
        edits=(
            Insert(
                "region",
                """
                where = TWIN[0] if dist.get_rank() == $rank else $group  # fault
                $x = $x + 0.1 * funcol.all_reduce($x.detach(), "sum", where)  # fault
                """,
            ),
            Insert("file", "TWIN: list[dist.ProcessGroup] = []"),
            Insert("setup", "TWIN.append(frame.twin_of_tp(job.mesh))"),
        ),
        causes=causes("group", "wrong_group"),
        blame=Blame.DIFFER,
    ),
    Operator(
        name="unwaited",
        what="rank R reads the result of an all-reduce without waiting for it",
        edits=(
            Insert(
                "region",
                """
                total = torch.ops._c10d_functional.all_reduce($x.detach(), "sum", $group.group_name)  # fault
                if dist.get_rank() != $rank:  # fault
                    total = torch.ops._c10d_functional.wait_tensor(total)  # fault
                $x = $x + 0.1 * total  # fault
                """,
            ),
        ),
        causes=causes("unwaited"),
        blame=Blame.DIFFER,
    ),
    Operator(
        name="dropped_result",
        what="rank R drops the result of an all-reduce",
        edits=(
            Insert(
                "region",
                """
                total = funcol.all_reduce($x.detach(), "sum", $group)  # fault
                if dist.get_rank() != $rank:  # fault
                    $x = $x + 0.1 * total  # fault
                """,
            ),
        ),
        causes=causes("unused_result", "rank_branch"),
        blame=Blame.DIFFER,
    ),
)
