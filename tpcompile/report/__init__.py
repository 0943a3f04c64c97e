"""Verdict -> what a person or a CI system reads; no torch."""
