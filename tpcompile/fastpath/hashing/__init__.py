"""All that a launcher runs or reads -> texts to hash, equal wherever the program is installed and in every process.

written.py      code object, class or global -> its syntax tree, and that as text
libraries.py    module -> whether it is the program's own, or a library that counts by its version
definitions.py  global variable -> the statements that define it, or the library that it is of
scopes.py       names that a function, class or comprehension binds itself
names.py        syntax tree of a function -> what it names, what it changes, which files it reads
paths.py        names of files without where they are installed; expression -> the file that it names
classes.py      class, instance or function -> its definition, attributes, state, defaults
plain.py        texts of values, by themselves or by those of their parts
effects.py      code that a launcher runs -> what it changes there
reached.py      what a walk has reached so far
walk.py         launcher -> texts of all that is reached from it; what has none is refused by name
"""
