"""Samples of a served run, for people and exports: a small gRPC client that needs no torch, and no training."""
