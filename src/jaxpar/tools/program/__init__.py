"""A compiled program as text and as operations, without a clock."""
