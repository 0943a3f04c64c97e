"""What each rank did, in order -> where the ranks parted and which of them left the common program: pure, torch-free.

stream         what one rank did: events, oldest first
tracks         streams -> what ranks have in common to compare, side by side, and the first difference
expect         events so far -> what comes next if the program goes on as before
source_order   whether a program went back between two events, and which is below in the source
ways           the ways that ranks went at a difference
usual          ways -> which is the common program, and why: the one place that decides who left it
edit           the common program and an odd way -> left out, added, instead, ended or content
parting        the result, and the line without executed lines: where stacks part
align          streams -> the first parting
"""
