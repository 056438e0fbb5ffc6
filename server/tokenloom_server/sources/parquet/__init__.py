"""Parquet files: row groups, read by Arrow or, for lists of integers, page by page."""
