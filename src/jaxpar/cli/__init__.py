"""`python -m jaxpar bench`: the overlapped matmuls timed against the naive ones, in one run."""

from jaxpar.bench._cli import add_parser as add_parser
