"""Reusable property-testing tools for sharded JAX code."""
