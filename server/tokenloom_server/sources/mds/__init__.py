"""The shards of Mosaic streaming."""
