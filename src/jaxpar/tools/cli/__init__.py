"""The commands of `jaxpar`, and what the benchmarks share with them."""
