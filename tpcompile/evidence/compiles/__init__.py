"""Structured-trace events -> `CompileRecord`s."""
