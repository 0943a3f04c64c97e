"""Complete programs and modules to copy; not part of the installed package."""
