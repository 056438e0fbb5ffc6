"""The Hugging Face Hub: a dataset's files at a commit, found by its card or their names, and read by ranges."""
