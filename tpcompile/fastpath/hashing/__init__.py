"""All that a launcher runs or reads -> texts to hash, equal wherever the program is installed and in every process.

written.py    code object, class or global -> its syntax tree, and that as text
libraries.py  module -> whether it is the program's own, or a library that counts by its version
names.py      syntax tree of a function -> what it names, what it changes, which files it reads
paths.py      expression -> the file that it names
plain.py      values that have a text by themselves
walk.py       launcher -> texts of all that is reached from it; what has none is refused by name
"""
