"""Tokenloom in the frameworks that people train with. Each module needs its framework, and is imported by itself."""
