"""Plans as text and as a picture, and what the files of a new run hold."""
