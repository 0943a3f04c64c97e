"""Run by every Python that a test starts: garbage is looked for less often, as in the processes that are forked.

An import of torch makes objects that stay; looking for garbage among them is a quarter of its CPU time.
"""

import gc

gc.set_threshold(200_000, 50, 1000)
