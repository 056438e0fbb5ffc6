"""The loaders that a trainer would otherwise pick, on the same data: ``python -m benchmarks.peers --help``."""
