"""The datasets, a class for each mode: remote and local training, evaluation, peek; numpy arrays without torch.

Each has a connection of its own; it owns the connection's life and the history that states are written from. What of
them needs torch is in ``tensors`` and the modules that import it.
"""
