"""Mesh axes in a traced program: rings, varying axes, and 8-bit arrays."""
