"""Explains a layout's cost, and infers layouts from functions."""
