"""The past of a run, explained: what a sample was made of, and what a run has to show for its data."""
