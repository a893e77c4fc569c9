"""Programs of several processes: start, comparison and guard."""
