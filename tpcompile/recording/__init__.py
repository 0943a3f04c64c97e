"""Capture what torch compiled in this process."""

from tpcompile.recording.session import CaptureSession

__all__ = ["CaptureSession"]
