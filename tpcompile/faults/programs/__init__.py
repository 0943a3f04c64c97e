"""Planted faults and healthy look-alikes, one small program each, written as a user would.

A fault acts where `context.faulty(step)` is true.
"""
