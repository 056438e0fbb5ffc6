"""The past of a run, made again: peeks, traces, receipts, snapshots to restore, and samples to evaluate on.

Enters: a sample index, and the states that the run's ledger holds. ``order.replay`` goes forward from there; ``past``
owns the queue and the states known between. Leaves: samples, their documents, and what a run has to show for its data.
It writes two things to the ledger: snapshots that are saved, and the pin that says where the next generation starts.
"""
