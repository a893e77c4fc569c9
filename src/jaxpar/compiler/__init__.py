"""Hides differences between versions of jax, and tells compilers their options."""
