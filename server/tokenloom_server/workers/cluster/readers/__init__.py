"""Readers: text becomes documents in tasks elsewhere, and everything that decides the order stays in the server."""
