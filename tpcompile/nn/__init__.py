"""The tensor-parallel transformer block and its parts."""
