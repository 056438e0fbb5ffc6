"""Losses of single tokens, and their means by source over all ranks."""
