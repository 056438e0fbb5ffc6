"""Rows that are ready tensors: their columns, their buckets, and the values of any rows of a source, in any order."""
