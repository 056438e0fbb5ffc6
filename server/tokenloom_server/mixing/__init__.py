"""Mixing: which source gives the next sample."""
