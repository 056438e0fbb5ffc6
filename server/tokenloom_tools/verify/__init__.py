"""``tokenloom verify A B``: whether two runs had the same data, and up to which sample.

Each of the two is a served run, which knows its rolling digest at every committed sample index, or a snapshot out of a
checkpoint, which knows it at its own index and at the state boundary before it. Equal digests at an index prove that
the samples before it are the same.
"""
