"""The commands of `python -m jaxpar`, and what the benchmarks share with them."""
