"""The parts of the language model that benchmarks/language_model.py trains."""
