"""A training run by its tokens: learning rates, how long it is, how far it has come."""
