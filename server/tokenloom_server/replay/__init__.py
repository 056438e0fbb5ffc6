"""What people and evaluations read of a run's samples: peeks, traces, receipts, and samples to evaluate on.

Enters: a sample index. ``run.past`` finds the nearest state and goes forward, ``order.replay`` makes the samples.
Leaves: samples, their documents, and what a run has to show for its data. Nothing is written.
"""
