"""The canonical order: from a run's record to its numbered samples, by way of phases and revisions; states, sealed."""
