"""The core: ring programs as data, and what runs them."""
