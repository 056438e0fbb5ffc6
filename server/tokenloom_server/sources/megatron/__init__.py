"""Indexed datasets of Megatron-LM."""
