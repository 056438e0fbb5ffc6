"""The optimised chunks of LitData."""
