"""Planted faults, and healthy programs that look like one: small programs, written as a user would write them.

A fault acts where `context.faulty(step)` is true.
"""
