"""Predictions, public measurements, and errors by kind of work."""
