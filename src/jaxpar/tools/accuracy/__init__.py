"""Predictions held against public measurements, and the error of each class of work."""
