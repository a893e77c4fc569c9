"""Guards the calls of several processes, and says who waits for whom."""
