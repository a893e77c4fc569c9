"""Explains why a program waits for transfers, and which edits help."""
