"""`python -m jaxpar predict`: what the compiler's schedule leaves exposed, without the devices."""

from jaxpar.predict._cli import add_parser as add_parser
