"""Flat arrays of ids."""
