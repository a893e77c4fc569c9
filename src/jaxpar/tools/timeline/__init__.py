"""Timelines of programs."""
