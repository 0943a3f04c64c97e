"""All that a launcher runs or reads -> texts to hash, equal wherever the program is installed and in every process.

trees.py        function, class or module -> its syntax tree, that as text, and the names that a scope binds itself
libraries.py    module -> whether it is the program's own, or a library that counts by its version
files_read.py   names of files without where they are installed; expression -> the file that it names
names.py        syntax tree of a function -> what it names, what it changes, which files it reads
effects.py      code that a launcher runs -> what it changes there, and the attributes that methods change
definitions.py  global variable -> the statements that define it, or the library that it is of
values.py       value, class or function -> what of it counts: items, state, attributes, defaults
walk.py         launcher -> texts of all that is reached from it; what has none is refused by name
"""
