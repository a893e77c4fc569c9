"""Explains why a program waits for transfers."""
