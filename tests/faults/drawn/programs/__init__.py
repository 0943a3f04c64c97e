"""Real tensor-parallel programs whose source has marked places for operators; each is run as the script of a rank.

`template.py` describes the marks.
"""
