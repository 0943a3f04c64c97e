"""Programs of the cases, small and written as a user would; the fault strikes where `context.faulty(step)` is true."""
