"""The sums over the ranks of compiled graphs, each by the algorithm that was measured to be fastest at its size.

    graph   wait_tensor(all_reduce(x, "sum", group))  ->  tpcompile::all_reduce_by_size(x, rows, group)
            wait_tensor(all_reduce(a @ b, ...))       ->  tpcompile::all_reduce_push_product, .._receive, ...
            all_reduce(...), work, wait_tensor(...)   ->  tpcompile::all_reduce_push_start, work, .._receive,
                                                      the addition, .._release
            several small ones that only leave it     ->  one

The rewrite is made in Inductor, behind AOTAutograd: Dynamo's and AOT's graphs, and what the gate compares of them, keep
the all-reduce. A sum that the table leaves to NCCL stays as it is.

table.py      measured times -> rows (up to so many bytes, this algorithm), by GPU and number of ranks
table.json    the rows that ship with tpcompile; `tpcompile tune --write` measures and writes them
tuning.py     a group of GPUs -> measured times, and the rows that they give
tuned.py      the cell that all ranks of a group use: shipped, kept by this machine, or measured together at setup
in_flight.py  ops for a sum of two ranks that has work beside it, or a product before it, by copy engines
pushed_sums.py   graphs with those ops in place of a sum
packed_sums.py   graphs in which small sums that only leave them are one
op.py         the op: a tensor, rows and a group -> its sum over the ranks
workspace.py  the memory of a group through which its ranks exchange, sized before a capture
setting.py    `nccl`, `by_size` or a table -> options of torch.compile, and what the ranks compare
"""

from tpcompile.by_size.setting import Sums, sums
from tpcompile.by_size.table import Table

__all__ = ["Sums", "Table", "sums"]
