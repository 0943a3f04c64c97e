"""Comparison of tensor-parallel modules with their single-device references: for the gate, and for users' own tests.

`tpcompile.testing` has the names that users call.

check.py             `check_numerics`: a module on the ranks of a group, eager, compiled, in several dtypes -> report
local.py             `check_numerics_local`: all ranks in one process and thread, eager
single_device.py     the single-device module in float64 and in the dtype under test, and errors against it
draw.py              weights and inputs from a seed, head-skewed or whole numbers
drawn.py             the random numbers of a run, drawn again in float64
error_ratio.py       errors as multiples of the single-device error
localise.py          the first module whose output is wrong
wrong_op.py          the op that wrong numbers begin with: one search, forward and backward, for all routes
trace.py            what the ops of one run returned: records
traced.py            every op of one eager run: its line, and a fingerprint of its result
callers.py           the frame that runs an op, and the lines that led to it
fingerprints.py      a tensor -> sums under signs, of all of it and of each rank's parts
judged.py            what the references have, and the ways in which a value is right: whole, as a part, as a summand
judging.py           the values of a run, one after the other -> how each is right
judged_run.py        a judged run, and what the reference has for each of its values
mistakes.py          the kind of the mistake: a table
trials.py            what makes a wrong run right when it is changed: by trying
recut.py             other rows of the full parameters than those that a rank has
repairs.py           changes of an op's result that are tried: a table
attached.py          lines that cut a gradient off, and the run without one of them
wrong_compiled.py    eager is right, compiled is wrong: the layer, the op, the kernel
beside_eager.py      each compiled graph of a call beside its eager values
smallest.py          the fewest nodes of a graph that are wrong where they are compiled
repro.py             a file of torch alone that shows it
apart.py             rows of it for an op whose inputs are right, but do not go together
beside_reference.py  rows of it that compare what an op was given with what the reference's was given
op_names.py          ops of torch by what they do to values
optimizer_step.py    gradients, optimizer state and weights of a train step, by parameter; then all is put back
rows.py              which rows of a full parameter a rank has, as the numbers show
spread.py            numbers moved by one unit in the last place: how far rounding alone goes
counting.py          collectives in issue order against the declaration
agree.py             whether all ranks drew the same tensors
numerics_report.py   the report
"""
