"""Which algorithm `mode="auto"` takes: a cost model, and what `jaxpar tune` has found."""
