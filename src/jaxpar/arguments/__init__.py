"""What public functions are given: their calls, checks, types and errors."""
