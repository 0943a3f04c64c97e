"""What scripts/test_wheel.sh copies beside an installed wheel, as a user's own files."""
