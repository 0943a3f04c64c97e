"""A cause -> its page: what it means, a program that has it, what to do; without torch.

The pages are `causes/NAME.md`. The sentences of `ADVICE` stand in them word for word.
"""

from tpcompile.explain.names import find, groups, page

__all__ = ["find", "groups", "page"]
