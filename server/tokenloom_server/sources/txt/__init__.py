"""Plain text, a row per line."""
