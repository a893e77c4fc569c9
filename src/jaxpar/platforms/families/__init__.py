"""A file for each family of chips, with a `Platform` for each kind."""
