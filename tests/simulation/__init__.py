"""Whole worlds of ranks, servers, faults and restarts in one process, each drawn from one seed.

What runs is the product: host, opener, generation, slots, history, producer, committer, pipeline, and the client's
snapshots. What is simulated is around it: the clocks, the network, the ledger's store, processes and their deaths.
``checker`` trusts none of it and recounts. ``python -m tests.simulation SEED`` replays a world with its events.
"""
