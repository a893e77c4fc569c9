"""What differs between versions of jax, and what compilers are told."""
