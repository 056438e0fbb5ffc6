"""What people and evaluations read of a run's samples: peeks, and samples to evaluate on.

Enters: a sample index. ``run.past`` finds the nearest state and goes forward, ``order.replay`` makes the samples.
Leaves: samples. Nothing is written.
"""
