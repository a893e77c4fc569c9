"""Chooses the algorithm of `mode="auto"`, by a cost model or by what `jaxpar tune` found."""
