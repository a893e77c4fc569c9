"""Collective matmuls and ring collectives for hand-written `jax.shard_map` programs."""

__version__ = "0.1.0"
