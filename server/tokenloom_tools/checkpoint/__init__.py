"""What a trainer's checkpoint says about its data: read from the file alone, without running anything in it."""
