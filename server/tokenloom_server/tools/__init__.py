"""What commands do outside a server: ask one, read checkpoints, compare runs, export samples."""
