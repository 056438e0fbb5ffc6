"""What people read about a run, as text and tables."""
