"""Layouts explained and inferred: what a layout costs, and which fits a function."""
