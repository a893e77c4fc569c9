"""Programs of several processes: start, description and comparison."""
