"""Real tensor-parallel programs whose source has marked places for operators; each is run as the script of a rank.

`generated/template.py` describes the marks.
"""
