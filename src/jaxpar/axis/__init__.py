"""Mesh axes in a traced program: rings, what varies over them, and in which bits arrays travel."""
