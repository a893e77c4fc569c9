"""Programs of several processes: their start, comparison and guard."""
