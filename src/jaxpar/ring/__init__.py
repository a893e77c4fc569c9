"""The core: ring programs as data, and the code that runs them."""
