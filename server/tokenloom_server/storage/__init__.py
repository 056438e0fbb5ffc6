"""Where files lie: local folders, and whatever fsspec reads. All that touches a corpus goes through here."""
