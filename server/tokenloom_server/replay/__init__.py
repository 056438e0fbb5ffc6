"""The past of a run, made again: peeks, traces, receipts, snapshots to restore, and samples to evaluate on.

Enters: a sample index, and the states that the run's ledger holds. ``order.replay`` goes forward from there; ``past``
owns the queue and the states known between. Leaves: samples, their documents, and what a run has to show for its data.
Nothing here writes to a run but where its next generation starts.
"""
