"""The commands of `jaxpar`."""
