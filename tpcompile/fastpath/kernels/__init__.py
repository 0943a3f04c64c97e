"""Fused kernels that ship with tpcompile: each with its plain code, its backward or none, and its declaration."""
