"""What Tokenloom costs, measured: ``python -m benchmarks --help``."""
