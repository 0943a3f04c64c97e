"""Capture what torch compiled in this process."""

from tpcompile.capture.session import CaptureSession

__all__ = ["CaptureSession"]
