"""What each rank did, in order -> where the ranks parted and which of them left the common program: torch-free.

From the lines that each rank executed, where they were recorded:

flow.py          bytes of a ring -> the lines of user code that one rank executed, and the values that they set
walk.py          the lines of two ranks side by side -> the forks at which they part
detours.py       two sequences that differ -> the fewest detours to where they are equal again
source.py        a line of source -> the names that it reads and sets
values.py        values that two ranks set in the same steps -> those that differ as never before
before.py        what ranks had set differently before the first step, if it is no part of their roles
depends.py       what was executed before a place -> the names and values that it depends on
reasons.py       what two ranks did differently -> the fork or the value that it comes from
pair.py          two ranks -> what of their differences counts, and what it comes from
given.py         a branch -> the values that its line reads and that tell the sides apart
own_branch.py    one rank, and where it parts from itself before -> that branch, and both ways as sides
own_way.py       one rank, and what it left out -> the branch at which it went another way than before
leaving.py       a function that was left by a yield, or an exception -> whose line decided that
branch_past.py   the ways that all ranks went at a branch before -> the one that is due
part.py          all ranks -> the one that counts, what each rank did there, and the odd ranks
conclude.py      a verdict and that branch -> the verdict that leads with it

From events alone (the sentinel's only way to say who parted, where no lines were recorded):

stream.py        what one rank did: events, oldest first
tracks.py        streams -> what ranks have in common to compare, side by side, and the first difference
expect.py        events so far -> what comes next if the program goes on as before
source_order.py  whether a program went back between two events, and which is below in the source
ways.py          the ways that ranks went at a difference
usual.py         ways -> which is the common program, and why: the one place that decides who left it
edit.py          the common program and an odd way -> left out, added, instead, ended or content
parting.py       the result, and the line without executed lines: where stacks part
label.py         a parting -> cause and sentence, one row for each kind
align.py         streams -> the first parting
"""
