"""Predictions and public measurements, and the error of each kind of work."""
