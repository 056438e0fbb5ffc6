"""Packing: from the documents of one source to its samples."""
