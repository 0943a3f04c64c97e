"""Operators in the compiled region: breaks, branches, constants, order."""

from __future__ import annotations

from tests.faults.drawn.operators.operator import Blame, Operator, causes
from tests.faults.drawn.template import Insert

_RANK_OF_MODULES = """
    for part in $model.modules():
        part.rank = job.rank
"""

OPERATORS = (
    Operator(
        name="print_in_region",
        what="rank R prints a tensor inside of the region",
        edits=(
            Insert(
                "region",
                """
                if dist.get_rank() == $rank:
                    print("mean", $x.mean())  # fault
                """,
            ),
        ),
        variants=(
            (
                Insert(
                    "region",
                    """
                    if $module.rank == $rank:
                        print("mean", $x.mean())  # fault
                    """,
                ),
                Insert("built", _RANK_OF_MODULES),
            ),
        ),
        causes=causes("graph_break"),
    ),
    Operator(
        name="log_in_region",
        what="rank R logs a tensor inside of the region",
        edits=(
            Insert(
                "region",
                """
                if dist.get_rank() == $rank:
                    logging.getLogger("train").warning("mean %s", $x.mean())  # fault
                """,
            ),
        ),
        variants=(
            (
                Insert(
                    "region",
                    """
                    if $module.rank == $rank:
                        LOG.info("mean %s", $x.mean())  # fault
                    """,
                ),
                Insert("built", _RANK_OF_MODULES),
                Insert("file", 'LOG = logging.getLogger("train")'),
            ),
        ),
        causes=causes("graph_break"),
    ),
    Operator(
        name="item_in_region",
        what="rank R calls .item() inside of the region",
        edits=(
            Insert(
                "region",
                """
                if dist.get_rank() == $rank:
                    SEEN.append($x.sum().item())  # fault
                """,
            ),
            Insert("file", "SEEN: list[float] = []"),
        ),
        causes=causes("graph_break"),
    ),
    Operator(
        name="check_finite",
        what="rank R raises when a tensor is not finite: a branch on data",
        edits=(
            Insert(
                "region",
                """
                if dist.get_rank() == $rank:
                    if not torch.isfinite($x).all():  # fault
                        raise ValueError("not finite")
                """,
            ),
        ),
        causes=causes("graph_break"),
    ),
    Operator(
        name="break_by_request",
        what="rank R asks for a graph break",
        edits=(
            Insert(
                "region",
                """
                if dist.get_rank() == $rank:
                    torch._dynamo.graph_break()  # fault
                """,
            ),
        ),
        causes=causes("graph_break"),
    ),
    Operator(
        name="branch",
        what="rank R has ops that the other ranks do not have",
        edits=(
            Insert(
                "region",
                """
                if dist.get_rank() == $rank:  # fault
                    $x = $x * torch.sigmoid($x)  # fault
                """,
            ),
        ),
        variants=(
            (
                Insert(
                    "region",
                    """
                    if $module.rank == $rank:  # fault
                        $x = $x.clamp(min=-3.0)  # fault
                    """,
                ),
                Insert("built", _RANK_OF_MODULES),
            ),
            (
                Insert(
                    "region",
                    """
                    if int(os.environ["RANK"]) != $rank:  # fault
                        $x = $x + 0.5 * $x  # fault
                    """,
                ),
            ),
            (
                Insert(
                    "region",
                    """
                    if RANK == $rank:  # fault
                        $x = 1.0 - $x  # fault
                    else:
                        $x = $x - 1.0  # fault
                    """,
                ),
                Insert("file", 'RANK = int(os.environ["RANK"])'),
            ),
        ),
        causes=causes("rank_branch"),
        blame=Blame.DIFFER,
    ),
    Operator(
        name="rank_constant",
        what="a factor is computed from the rank",
        edits=(Insert("region", "$x = $x * (1.0 + 0.01 * dist.get_rank())  # fault"),),
        variants=(
            (Insert("region", "$x = $x + 0.001 * dist.get_rank($group)  # fault"),),
            (Insert("region", '$x = $x * (1 + int(os.environ["RANK"]))  # fault'),),
        ),
        causes=causes("rank_constant"),
        blame=Blame.ALL,
    ),
    Operator(
        name="attribute_constant",
        what="an attribute of the module has a different value on rank R from the beginning",
        edits=(
            Insert("region", "$x = $x * $module.strength  # fault"),
            Insert(
                "built",
                """
                for part in $model.modules():
                    part.strength = 0.5 if job.rank == $rank else 0.75  # fault
                """,
            ),
        ),
        causes=causes("rank_constant", "python_value"),
        blame=Blame.DIFFER,
    ),
    Operator(
        name="environ_read",
        what="the region reads a variable of the environment that only rank R has",
        edits=(
            Insert("region", '$x = $x * float(os.environ.get("LOGIT_SCALE", "1.0"))  # fault'),
            Insert(
                "setup",
                """
                if job.rank == $rank:
                    os.environ["LOGIT_SCALE"] = "1.5"  # fault
                """,
            ),
        ),
        causes=causes("rank_constant", "python_value", "environment"),
        blame=Blame.DIFFER,
    ),
    Operator(
        name="environ_star_import",
        what="the region reads the rank from os.environ, and os came with a star import",
        edits=(
            Insert("region", '$x = $x * (1.0 + float(environ["RANK"]))  # fault'),
            Insert("file", "from os import *  # noqa: F403"),
        ),
        causes=causes("rank_constant"),
        blame=Blame.ALL,
    ),
    Operator(
        name="set_order",
        what="the region walks over a set that rank R filled in opposite order",
        edits=(
            Insert(
                "region",
                """
                for power in POWERS:  # fault
                    $x = $x * 0.5 + power  # fault
                """,
            ),
            Insert("file", 'POWERS = set([8, 0] if os.environ["RANK"] == "$rank" else [0, 8])  # fault'),
        ),
        causes=causes("set_order"),
        blame=Blame.DIFFER,
    ),
    Operator(
        name="dict_order",
        what="the region walks over a dict that rank R filled in opposite order",
        edits=(
            Insert(
                "region",
                """
                for name, factor in $module.factors.items():  # fault
                    $x = $x * factor if name == "scale" else $x + factor  # fault
                """,
            ),
            Insert(
                "built",
                """
                names = ["shift", "scale"] if job.rank == $rank else ["scale", "shift"]  # fault
                for part in $model.modules():
                    part.factors = {name: 0.5 for name in names}  # fault
                """,
            ),
        ),
        variants=(
            (
                Insert(
                    "region",
                    """
                    for act in ACTS.values():  # fault
                        $x = act($x)  # fault
                    """,
                ),
                Insert(
                    "file",
                    """
                    ACTS = {"tanh": torch.tanh, "relu": torch.relu}
                    if os.environ["RANK"] == "$rank":
                        ACTS["tanh"] = ACTS.pop("tanh")  # fault
                    """,
                ),
            ),
        ),
        causes=causes("dict_order"),
        blame=Blame.DIFFER,
    ),
)
