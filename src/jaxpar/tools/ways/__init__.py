"""What `"auto"` chooses at each call site."""
