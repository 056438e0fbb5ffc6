"""The future of a run: the mixer itself, over what is known of its sources."""
