"""A program on a described or measured chip: what computes, travels and waits."""
