"""Datasets on the Hugging Face Hub."""
