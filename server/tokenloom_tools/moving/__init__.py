"""What another data loader had read, as the beginning of a run here."""
