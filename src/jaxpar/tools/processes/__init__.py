"""Programs of several processes: their start, what must be equal in all, who is where."""
