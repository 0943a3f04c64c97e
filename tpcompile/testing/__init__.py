"""Comparison of tensor-parallel modules with their single-device twins: for the gate, and for users' own tests."""
