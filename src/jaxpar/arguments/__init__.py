"""Arguments of public functions: calls, checks, types and errors."""
