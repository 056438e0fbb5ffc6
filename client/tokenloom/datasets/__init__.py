"""The datasets, a class for each mode: remote and local training, evaluation, peek.

Each is a torch dataset over a connection of its own; it owns the connection's life and the history that states are
written from.
"""
