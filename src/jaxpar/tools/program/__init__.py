"""A compiled program as text and operations, without times."""
